"""Moved to `hfdist.trainer.run.training_arguments`."""

from hfdist.moved import moved

__getattr__ = moved(__name__, "hfdist.trainer.run.training_arguments")
