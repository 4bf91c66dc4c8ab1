"""ZeRO by DeepSpeed: its config, its engine, and where it keeps what by name."""
