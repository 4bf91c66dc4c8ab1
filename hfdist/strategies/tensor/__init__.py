"""Tensor parallelism: how the layers of any model are divided over ranks, and what a rank computes with its part."""
