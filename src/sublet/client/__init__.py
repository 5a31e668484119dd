"""What programs hold: connect, leases, renewal, transport. Public names are fetched from `sublet` itself."""
