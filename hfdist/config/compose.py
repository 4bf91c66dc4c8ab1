"""Moved to `hfdist.config.composition.compose`."""

from hfdist.moved import moved

__getattr__ = moved(__name__, "hfdist.config.composition.compose")
