"""The composition roots: each recipe builds a run from a config, in order, and starts it."""
