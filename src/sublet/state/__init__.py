"""Values that survive a process: as bytes (``transfer``), in packs (``checkpoints``), on several replicas."""
