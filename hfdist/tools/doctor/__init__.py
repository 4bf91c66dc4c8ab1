"""The examination of a machine, and of the links between machines, before a job: `hfdist doctor`."""
