"""How costs grow: with ranks, with layers, and with the size of the corpus."""
