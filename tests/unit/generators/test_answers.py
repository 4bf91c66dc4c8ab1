"""Episodes as messages: what comes out is what went in, and what no generator would send is refused."""

import math

import pytest

from hfdist.messages.message import Message, NotAMessageError
from hfdist.rewards.generation import Turn
from hfdist.tune.answer import Answer
from hfdist.tune.generators.answer_check import AnswerCheck
from hfdist.tune.generators.answers import read_answers, write_answers
from hfdist.tune.generators.messages import pack, unpack

CHECK = AnswerCheck(num_generations=3, max_new_tokens=6, vocabulary=9, max_turns=2)
PLAIN = AnswerCheck(num_generations=3, max_new_tokens=6, vocabulary=9)
EPISODES = [
    Answer(
        tokens=[5, 6, 7, 8, 1],
        is_drawn=[True, True, False, False, True],
        has_ended=True,
        log_probabilities=[-0.5, -1.0, -2.0],
        turns=[Turn("assistant", "f\n\u00e9"), Turn("tool", "42", "sum"), Turn("assistant", "")],
        num_turns=2,
        num_calls=1,
        reward=-0.5,
    ),
    Answer(tokens=[5], is_drawn=[True], log_probabilities=[-0.5], turns=[Turn("assistant", "f")], num_turns=1),
    Answer(log_probabilities=[], fault="ValueError: no room"),
]


def sent(*answers):
    return unpack(pack(write_answers(*answers)))


def test_an_episode_comes_through_as_it_was():
    message = sent(EPISODES, [[1, 2, 3], [1, 2], [1, 2, 3]])
    assert CHECK.count_tokens(message) == 4
    given = read_answers(message, {1})
    assert [one.answer for one in given] == EPISODES
    assert [one.num_prompt_tokens for one in given] == [3, 2, 3]


def test_an_answer_of_one_turn_comes_through_as_it_was():
    answers = [Answer.of([5, 1], [-0.5, -1.0], end_ids={1}), Answer.of([5], [-0.5]), Answer.of([5, 5], [-0.5] * 2)]
    message = sent(answers)
    assert PLAIN.count_tokens(message) == 5
    assert [one.answer for one in read_answers(message, {1})] == answers
    assert [one.answer.has_ended for one in read_answers(message, {1})] == [True, False, False]


@pytest.mark.parametrize(
    "wrong",
    [
        {"drawn": [True]},
        {"drawn": [1, 1, 0, 0, 1]},
        {"drawn": [False] * 5},
        {"ended": 1},
        {"turns": [["assistant", "f"]]},
        {"turns": [["system", "f", ""]]},
        {"turns": ["f"]},
        {"num_turns": 3},
        {"calls": -1},
        {"reward": math.inf},
        {"fault": 7},
        {"prompt_tokens": -1},
    ],
)
def test_an_episode_that_no_generator_would_send_is_refused(wrong):
    written = sent(EPISODES, [[1]] * 3)
    CHECK.count_tokens(written)
    written["episodes"][0] |= wrong
    with pytest.raises(NotAMessageError):
        CHECK.count_tokens(written)


def test_answers_of_the_other_kind_and_too_many_are_refused():
    episodes, plain = sent(EPISODES, [[1]] * 3), sent([Answer.of([5], [-0.5])] * 3)
    for check, written in ((CHECK, plain), (PLAIN, episodes), (CHECK, episodes | {"episodes": []})):
        with pytest.raises(NotAMessageError):
            check.count_tokens(Message(written))
    with pytest.raises(NotAMessageError, match="has not 3 completions"):
        CHECK.count_tokens(sent(EPISODES[:2], [[1]] * 2))
