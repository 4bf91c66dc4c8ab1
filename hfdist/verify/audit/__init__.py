"""What a run has read, proven against the order that it was to read in. Uses nothing that reads or packs."""
