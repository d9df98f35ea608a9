"""What the core's commands do: staging, transfers, commits, pruning, reconciling."""
