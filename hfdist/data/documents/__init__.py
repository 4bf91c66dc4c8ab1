"""The documents of a run: one numbering, their tokens, and the held-out set."""
