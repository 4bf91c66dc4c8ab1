"""Launchers of a sweep's trials: as processes of this machine, as jobs of SLURM, or on machines of Ray."""
