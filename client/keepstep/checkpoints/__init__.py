"""Checkpoints on the local disk: writing, naming, records, and which to resume from."""
