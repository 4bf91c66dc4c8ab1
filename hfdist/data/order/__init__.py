"""The order of documents as arithmetic: shuffle, mixture of sources, and where a stream stands in it."""
