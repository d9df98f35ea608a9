"""The commands on a destination; `mooring_agent.cli` finds them."""
