"""Benchmarks: each file is a command that measures one thing against its peers and its bound."""
