"""Evaluation in the layout that trains: held-out loss, generation, metrics, early stopping."""
