"""Restores the newest checkpoint that can be restored from the destination to the volume, before training starts.

Knows nothing of how the store is reached. Pass a `RetryingStore`.
"""
