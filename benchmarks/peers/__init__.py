"""What we measure against. Each peer starts in a folder of its own on a loopback port, and ends with the run."""
