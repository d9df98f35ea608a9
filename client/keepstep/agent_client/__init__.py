"""Calls to the agent, and the lock that shows it that this process is alive."""
