"""Moves a file's bytes to a socket, and an answer's bytes into a preallocated file. Knows nothing of S3."""
