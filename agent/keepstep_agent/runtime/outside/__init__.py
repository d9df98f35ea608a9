"""What the agent tells the outside, by one outbox: receivers of commits, Kubernetes, Kueue, and the run's ledger."""
