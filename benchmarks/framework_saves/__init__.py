"""How long frameworks wait for a save of 1 GiB, with and without Keepstep."""
