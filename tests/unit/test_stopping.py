"""When the held-out losses so far end a run."""

import math

import pytest

from hfdist.trainer.stopping import num_without_improvement


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
