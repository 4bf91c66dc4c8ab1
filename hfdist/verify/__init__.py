"""Proofs about a run: that a layout trains as one process does, and that every document was read as planned."""
