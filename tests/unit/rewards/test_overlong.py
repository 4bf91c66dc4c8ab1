"""The reward `overlong`."""

import pytest
from trl.rewards import get_soft_overlong_punishment

from hfdist.rewards import Generation, load_rewards


@pytest.mark.parametrize("most", [100, 7])
def test_long_answers_are_punished_as_in_trl(most):
    [reward] = load_rewards({"overlong": 1.0})
    lengths = range(1, most + 1)
    scores = reward([Generation(prompt="", text="", reference="", num_tokens=n, most_tokens=most) for n in lengths])
    assert scores == pytest.approx(get_soft_overlong_punishment(most, most / 5)([[0] * n for n in lengths]))
    assert (str(scores[0]), scores[-1]) == ("0.0", -1.0)


def test_a_generation_without_lengths_is_not_punished():
    [reward] = load_rewards({"overlong": 1.0})
    assert reward([Generation(prompt="", text="a", reference="")]) == [0.0]
