"""When the held-out losses so far end a run, of which a checkpoint holds the newest."""

import math
from dataclasses import fields

import pytest

from hfdist.config.ranges import LIMIT
from hfdist.config.run import EvaluateConfig
from hfdist.trainer.checkpointing.training_state import NUM_ENTRIES, drop_old, newest_entries, newest_losses
from hfdist.trainer.evaluation.evaluators import num_without_improvement


@pytest.mark.parametrize(
    ("losses", "min_delta", "expected"),
    [
        ([], 0.0, 0),
        ([3.0], 0.0, 0),
        ([3.0, 2.0, 1.0], 0.0, 0),
        ([3.0, 2.0, 2.0, 2.5], 0.0, 2),
        ([3.0, 2.0, 2.5, 1.9], 0.0, 0),
        ([3.0, 2.5, 2.25], 0.5, 1),
        # Two small steps are a large one: the best stays where it was until then.
        ([3.0, 2.75, 2.5], 0.5, 0),
        ([math.nan, 3.0, math.nan, math.inf], 0.0, 2),
        ([math.nan, math.nan], 0.0, 2),
    ],
)
def test_evaluations_without_an_improvement_are_counted(losses, min_delta, expected):
    assert num_without_improvement(losses, min_delta) == expected


def test_a_checkpoint_holds_a_bounded_history_that_decides_as_the_whole_does():
    history = [{"step": 0, "eval_loss": 9.0}]
    for step in range(1, 3 * NUM_ENTRIES):
        history.append({"step": step, "loss": 1.0})
        if step % 2 == 0:
            history.append({"step": step, "eval_loss": 1.0 + step % 7})
    kept = newest_entries(history)
    assert [entry for entry in kept if "loss" in entry] == [e for e in history if "loss" in e][-NUM_ENTRIES:]
    assert [entry for entry in kept if "eval_loss" in entry] == [e for e in history if "eval_loss" in e][-NUM_ENTRIES:]
    assert [entry["step"] for entry in kept] == sorted(entry["step"] for entry in kept)
    later = {"step": 3 * NUM_ENTRIES, "eval_loss": 5.0}
    assert newest_losses([*kept, later]) == newest_losses([*history, later])
    assert newest_entries(kept) == kept
    assert newest_entries(history[:9]) == history[:9]


def test_the_history_of_a_run_is_bounded_in_place_and_decides_as_the_whole_does():
    whole, held, longest = [], [], 0
    for step in range(6 * NUM_ENTRIES):
        entry = {"step": step, "eval_loss" if step % 5 == 0 else "loss": float(step % 7)}
        whole.append(entry)
        held.append(entry)
        drop_old(held)
        longest = max(longest, len(held))
    assert longest < 4 * NUM_ENTRIES
    assert newest_entries(held) == newest_entries(whole)
    assert newest_losses(held) == newest_losses(whole)


def test_patience_fits_into_what_a_checkpoint_holds():
    (limit,) = [field.metadata[LIMIT] for field in fields(EvaluateConfig) if field.name == "patience"]
    # The first of those that are held counts as an improvement.
    assert limit.accepts(NUM_ENTRIES - 1)
    assert not limit.accepts(NUM_ENTRIES)
