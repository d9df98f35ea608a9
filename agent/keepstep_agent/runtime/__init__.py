"""The imperative shell: feeds events to the core, runs its commands, serves the API."""
