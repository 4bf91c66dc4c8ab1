"""Which entries of `state.log_history` a run and its checkpoints keep, and what they say of held-out data."""

from __future__ import annotations

from collections import Counter

from transformers import TrainerState

NUM_ENTRIES = 1000
"""Evaluations that a checkpoint holds at most, and other entries; metrics.jsonl has all of them."""
_LOSS = "eval_loss"
"""The key by which an entry is one of an evaluation."""


def newest_entries(log_history: list[dict[str, float]]) -> list[dict[str, float]]:
    """Give the newest `NUM_ENTRIES` evaluations and the newest `NUM_ENTRIES` other entries, in their order."""
    kept: list[dict[str, float]] = []
    counts = Counter[bool]()
    for entry in reversed(log_history):
        is_evaluation = _LOSS in entry
        counts[is_evaluation] += 1
        if counts[is_evaluation] <= NUM_ENTRIES:
            kept.append(entry)
    return kept[::-1]


def drop_old(log_history: list[dict[str, float]]) -> None:
    """Take older entries out of the list once it holds four times as many: rarely, since each cut copies the list."""
    if len(log_history) >= 4 * NUM_ENTRIES:
        log_history[:] = newest_entries(log_history)


def newest_losses(log_history: list[dict[str, float]]) -> list[float]:
    """Give the held-out losses of the newest `NUM_ENTRIES` evaluations, oldest first; a resume does not change them."""
    return [entry[_LOSS] for entry in log_history if _LOSS in entry][-NUM_ENTRIES:]


def held_out_loss_of(state: TrainerState) -> float | None:
    """The held-out loss, if this very step was evaluated. Any one rank may call it."""
    last = next((entry for entry in reversed(state.log_history) if _LOSS in entry), None)
    return float(last[_LOSS]) if last is not None and last["step"] == state.global_step else None
