"""``rebuild`` alone: checkpoints name it, so it stays where it was when they were written. The rest is in ``state``."""
