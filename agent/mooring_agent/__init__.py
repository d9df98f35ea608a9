"""The Mooring agent: gets checkpoints off the pod's disk into object storage, newest first, and back again."""

from importlib.metadata import version

__version__ = version("mooring")
