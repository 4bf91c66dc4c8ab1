"""What of a model is trained: all of it, an adapter, or parameters by pattern."""
