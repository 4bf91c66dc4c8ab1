"""CPU time of a step where two ranks share the state, the matrices or the sequences of a small Llama."""
