"""`mooring demo`: a preemption and the loss of a disk, with real processes and a real S3 server."""

from mooring_agent.demo.story import run_demo

__all__ = ["run_demo"]
