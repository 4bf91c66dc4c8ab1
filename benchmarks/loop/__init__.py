"""CPU time of an optimizer step in training loops, beside that of a loop without any."""
