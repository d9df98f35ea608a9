"""The Keepstep agent: gets checkpoints off the pod's disk into object storage, newest first, and back again."""

from keepstep_api import __version__ as __version__
