"""Where files are: here or on a network, found by pattern, kept on this machine while they are needed."""
