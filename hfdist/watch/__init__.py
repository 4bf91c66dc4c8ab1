"""Notices a rank that is dead, hung or cut off, says which rank waits for which, and ends the run with exit code 6."""

from hfdist.watch.callback import Watch, watches_among
from hfdist.watch.diagnosis import SAVING

__all__ = ["SAVING", "Watch", "watches_among"]
