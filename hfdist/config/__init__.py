"""Typed config values, their checks and all batch arithmetic. Loads no torch."""
