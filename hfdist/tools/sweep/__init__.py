"""Sweeps: many runs that differ in some keys, side by side or one after another, and which of them was best."""
