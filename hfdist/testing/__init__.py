"""Helpers for tests of distributed training; shipped, so that users can test theirs."""

from hfdist.testing.launch import RankFailed, run_ranks

__all__ = ["RankFailed", "run_ranks"]
