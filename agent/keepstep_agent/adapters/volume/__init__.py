"""The volume that trainer and agent share: finds and pins checkpoints, measures and reserves disk space."""
