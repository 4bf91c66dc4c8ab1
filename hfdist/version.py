"""The version, for those that import nothing else."""

__version__ = "0.1.0"
