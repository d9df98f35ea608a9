"""Restores the newest checkpoint and the newest snapshots from the destination, before training starts.

Knows nothing of how the store is reached. Pass a `RetryingStore`.
"""
