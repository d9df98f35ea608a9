"""How the bytes of a file reach a socket, and how an answer's bytes reach a preallocated file. Knows nothing of S3."""
