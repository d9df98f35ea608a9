"""`keepstep console`: pages of all runs below a prefix and of each, from markers and ledgers alone."""
