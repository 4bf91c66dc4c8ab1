"""The measurement of collectives by size, on one machine or several: `hfdist bandwidth`."""
