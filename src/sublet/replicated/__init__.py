"""State on several replicas, for writers whose leases end: the register, checkpoints, idempotency."""
