"""Which entries of `state.log_history` a run and its checkpoints keep."""

from __future__ import annotations

NUM_ENTRIES = 1000
"""Evaluations that a checkpoint holds at most, and other entries; metrics.jsonl has all of them."""


def newest_entries(log_history: list[dict[str, float]]) -> list[dict[str, float]]:
    """Give the newest `NUM_ENTRIES` evaluations and the newest `NUM_ENTRIES` other entries, in their order."""
    kept: list[dict[str, float]] = []
    numbers = {True: 0, False: 0}
    for entry in reversed(log_history):
        is_evaluation = "eval_loss" in entry
        numbers[is_evaluation] += 1
        if numbers[is_evaluation] <= NUM_ENTRIES:
            kept.append(entry)
    return kept[::-1]


def drop_old(log_history: list[dict[str, float]]) -> None:
    """Take older entries out of the list itself once it holds four times as many: less often than with each entry."""
    if len(log_history) >= 4 * NUM_ENTRIES:
        log_history[:] = newest_entries(log_history)


def newest_losses(log_history: list[dict[str, float]]) -> list[float]:
    """Give the held-out losses of the newest `NUM_ENTRIES` evaluations, oldest first: before a resume as after it."""
    return [entry["eval_loss"] for entry in log_history if "eval_loss" in entry][-NUM_ENTRIES:]
