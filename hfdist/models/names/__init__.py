"""The names of a model's weights: those in its class, those in its files, and how the ones follow from the others."""
