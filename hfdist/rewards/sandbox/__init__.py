"""Where programs of a model run, and cannot reach anything. Loads no torch."""
