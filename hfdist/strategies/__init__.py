"""Ways of spreading a model over processes: one file each, chosen in `select`."""
