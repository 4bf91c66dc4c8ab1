"""hfdist's token stream beside its peers: `python -m benchmarks.data`."""
