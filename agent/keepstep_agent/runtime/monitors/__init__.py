"""What the agent observes by itself: ranks, signals, disk, preemption notices, other writers, directories."""
