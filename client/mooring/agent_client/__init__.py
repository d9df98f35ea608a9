"""Calls to the agent, and the lock by which it sees that this process lives."""
