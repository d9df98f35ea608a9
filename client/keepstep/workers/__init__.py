"""Lets the trainer's worker processes outlive the SIGTERM that a launcher sends to the whole process group."""
