"""Job files for clusters, written from a run's config, and the programs that these files call. Loads no torch."""
