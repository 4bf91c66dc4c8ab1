"""Readers of a run folder's files: a reading takes only what is new, and trusts nothing that a file says."""
