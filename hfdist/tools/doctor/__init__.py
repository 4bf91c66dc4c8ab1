"""What a machine, and the links between machines, have for a run: `hfdist doctor`, before a job on a new machine."""
