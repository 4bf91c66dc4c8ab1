"""What the weights of a model are called: by its class, and in its files."""
