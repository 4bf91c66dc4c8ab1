"""Where documents come from: each source lists shards with their row counts, and reads a row by number."""
