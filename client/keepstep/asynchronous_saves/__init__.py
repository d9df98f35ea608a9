"""Saves that cost the training a copy: the files are written behind it."""
