"""What config values must satisfy, alone, together, and on this machine."""
