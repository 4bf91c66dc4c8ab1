"""Moved to `hfdist.config.cli.command`."""

from hfdist.moved import moved

__getattr__ = moved(__name__, "hfdist.config.cli.command")
