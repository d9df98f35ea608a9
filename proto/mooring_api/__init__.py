"""What the trainer's side and the agent's side agree on: the wire API and every shared name."""
