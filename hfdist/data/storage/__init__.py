"""Where files are: here or behind a network, found by pattern, kept on this machine while they are needed."""
