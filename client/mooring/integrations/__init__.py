"""One module for each training framework; each imports its framework only once somebody uses it."""
