"""A run whose checkpoints a framework writes: when it saves and stops, and how its checkpoints reach the agent."""

from keepstep.framework_run.run import FrameworkRun

__all__ = ["FrameworkRun"]
