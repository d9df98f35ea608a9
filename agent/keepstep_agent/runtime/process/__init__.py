"""The agent's process from start to end, and the programs that `keepstep run` starts."""
