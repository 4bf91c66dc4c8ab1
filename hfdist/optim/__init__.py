"""Optimizers: how they are made from a config, and which of them train in a layout as they do on one process."""
