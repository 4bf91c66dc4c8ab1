"""Job files for clusters, written from a run's config; and what runs beside a job on its machines. Loads no torch."""
