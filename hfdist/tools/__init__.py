"""What reads files of runs and machines, and starts processes: beside the training, not part of it."""
