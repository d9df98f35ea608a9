"""Rules that do not depend on the agent's state: retention, what to restore, how often to save."""
