"""Tools beside the training: they read files of runs, examine machines, and start jobs and sweeps. None has a model."""
