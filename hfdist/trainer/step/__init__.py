"""One training step: the loss and what it counts, the Trainer's step without repeated work, rows for each data rank."""
