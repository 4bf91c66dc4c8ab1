"""What a run holds of `log_history`, and a checkpoint of it: the newest, for it grows; metrics.jsonl has all of it."""

from __future__ import annotations

from typing import Any

NUM_ENTRIES = 1000
"""Evaluations that a checkpoint holds at most, and other entries."""


def newest_entries(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give the newest `NUM_ENTRIES` evaluations and the newest `NUM_ENTRIES` other entries, in their order."""
    kept: list[dict[str, Any]] = []
    numbers = {True: 0, False: 0}
    for entry in reversed(log_history):
        is_evaluation = "eval_loss" in entry
        numbers[is_evaluation] += 1
        if numbers[is_evaluation] <= NUM_ENTRIES:
            kept.append(entry)
    return kept[::-1]


def drop_old(log_history: list[dict[str, Any]]) -> None:
    """Take older entries out of the list itself once it holds four times as many: less often than with each entry."""
    if len(log_history) >= 4 * NUM_ENTRIES:
        log_history[:] = newest_entries(log_history)


def newest_losses(log_history: list[dict[str, Any]]) -> list[float]:
    """Give the held-out losses of the newest `NUM_ENTRIES` evaluations, oldest first: before a resume as after it."""
    return [entry["eval_loss"] for entry in log_history if "eval_loss" in entry][-NUM_ENTRIES:]
