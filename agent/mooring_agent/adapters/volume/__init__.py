"""The volume that trainer and agent share: finding checkpoints, pinning them, measuring and reserving its room."""
