"""The mirror of output directories: when to take a snapshot of them, and what it consists of."""
