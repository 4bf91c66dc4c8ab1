"""Programs that prove what hfdist claims or write pages of docs/; a person runs them, most by a target of the Makefile.

Tests run a few cases of the same functions. Helpers that tests need stand in tests/; programs import them from there.
"""
