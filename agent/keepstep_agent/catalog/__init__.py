"""Reads, checks and prunes what a destination holds, through the store ports.

Knows nothing of local disks, of the agent's state or of how the store is reached. Nothing here retries, except that
bytes that arrive wrong are fetched once more. So when people wait for the result, pass a `RetryingStore`.
"""
