"""How costs grow: with ranks, with layers, with the size of the corpus; and a save's with thousands of ranks."""
