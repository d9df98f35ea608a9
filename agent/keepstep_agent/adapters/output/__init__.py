"""The output directories: what lies there, what is announced of it, and what the newest snapshot of it holds."""
