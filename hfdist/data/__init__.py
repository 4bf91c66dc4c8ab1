"""Text to token sequences, in an order that does not depend on the number of processes."""
