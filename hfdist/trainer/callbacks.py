"""Moved to `hfdist.trainer.reporting.callbacks`."""

from hfdist.moved import moved

__getattr__ = moved(__name__, "hfdist.trainer.reporting.callbacks")
