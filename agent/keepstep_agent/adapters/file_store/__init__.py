"""A directory as the destination."""
