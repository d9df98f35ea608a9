"""The loop around the core: it journals events, runs the core, logs, and shows the state."""
