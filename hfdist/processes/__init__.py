"""Processes of Python: how they are started, and the signals that ask them to stop."""
