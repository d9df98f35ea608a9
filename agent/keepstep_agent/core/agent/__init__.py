"""The agent's state machine: events in, state changed, commands out."""
