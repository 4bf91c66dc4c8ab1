"""Where the trials of a sweep run: as processes of this machine, as jobs of SLURM, or on machines of Ray."""
