"""What the collectives of a machine or of several reach, by size: `hfdist bandwidth`."""
