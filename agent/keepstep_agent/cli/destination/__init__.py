"""The commands on a destination; `keepstep_agent.cli` finds them."""
