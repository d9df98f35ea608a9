"""Keepstep's upload and restore beside all that a user would pick instead: `python -m benchmarks.data_path`.

A C program plays the store (`server.c`), another one shows what the kernel alone needs (`limits.c`). Every tool is a
process of its own, watched from outside by the same code (`process`), on the same files.
"""
