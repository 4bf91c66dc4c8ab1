"""Notices a rank that is dead, hung or cut off, says which rank waits for which, and ends the run with exit code 6.

`heartbeat`, `diagnosis`, `snapshot` and `requests` load no torch.
"""
