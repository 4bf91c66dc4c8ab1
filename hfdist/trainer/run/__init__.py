"""A run from its config to its end: data, arguments, Trainer, training, held-out loss, export."""
