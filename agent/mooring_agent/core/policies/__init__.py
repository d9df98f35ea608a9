"""Rules that know nothing of the agent's state: retries, retention, what to restore, which certificates to renew."""
