"""Moved to `hfdist.trainer.evaluation.metrics`."""

from hfdist.moved import moved

__getattr__ = moved(__name__, "hfdist.trainer.evaluation.metrics")
