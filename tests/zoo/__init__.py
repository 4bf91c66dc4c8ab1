"""One tiny random model of every causal language model type that transformers knows."""
