"""Where a model comes from: the Hub, a folder or a GGUF file, verified, on this machine."""
