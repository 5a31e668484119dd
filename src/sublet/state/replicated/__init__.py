"""A register on a quorum of replicas; checkpoints and reservations on it. Public as ``sublet.replicated``."""
