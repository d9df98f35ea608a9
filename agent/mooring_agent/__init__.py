"""The Mooring agent: gets checkpoints off the pod's disk into object storage, newest first, and back again."""

# Here, and not asked of the installed package: that would be half the time of `mooring ready`.
__version__ = "0.1.0"
