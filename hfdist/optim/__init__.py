"""Optimizers: what the update of each may depend on, what it keeps, and the same one over other tensors."""
