"""What is found out about a model by asking a small one of its class."""
