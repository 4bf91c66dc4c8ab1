"""The processes of a run on this machine, and how they reach each other."""
