"""What is computed once and kept on this machine, for all ranks, epochs and runs."""
