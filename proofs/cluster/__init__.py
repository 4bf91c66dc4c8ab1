"""Two machines and a real SLURM, made of this machine, and what happens to runs there."""
