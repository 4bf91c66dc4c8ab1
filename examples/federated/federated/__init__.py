"""A Flower app whose clients launch hfdist."""
