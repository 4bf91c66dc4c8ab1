"""Gradients of the ranks: how they are added up, and how they travel."""
