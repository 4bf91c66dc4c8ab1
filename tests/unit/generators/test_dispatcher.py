"""Who answers what: each prompt once, by a policy that is not too old, whoever is slow or dies."""

import random

import pytest

from hfdist.tune.generators.dispatcher import Dispatcher


@pytest.fixture
def dispatcher():
    """Of steps of two prompts."""
    made = Dispatcher(max_staleness=1, answer_seconds=10)
    for number in range(8):
        made.add(number, number // 2, f"prompt {number}")
    return made


def numbers(given):
    return [number for number, _ in given]


def test_prompts_go_out_in_order_as_soon_as_their_policy_may_be_this_old(dispatcher):
    assert dispatcher.hand_out("a", 9, 0) == []
    dispatcher.publish(0)
    assert dispatcher.hand_out("a", 3, 0) == [(number, f"prompt {number}") for number in (0, 1, 2)]
    assert numbers(dispatcher.hand_out("b", 3, 0)) == [3]
    assert dispatcher.hand_out("c", 3, 0) == []
    dispatcher.publish(1)
    assert numbers(dispatcher.hand_out("c", 3, 0)) == [4, 5]


def test_a_late_generator_costs_its_own_share_and_the_first_answer_counts(dispatcher):
    dispatcher.publish(0)
    dispatcher.hand_out("slow", 2, 0)
    assert numbers(dispatcher.hand_out("fast", 4, 9.9)) == [2, 3]
    assert numbers(dispatcher.hand_out("fast", 4, 10.1)) == [0, 1]
    dispatcher.answer("fast", 0, 0, "of fast")
    dispatcher.answer("slow", 0, 0, "of slow")
    dispatcher.answer("slow", 1, 0, "of slow")
    assert [dispatcher.take(number, 0).content for number in (0, 1)] == ["of fast", "of slow"]
    dispatcher.answer("fast", 1, 0, "of fast")
    assert dispatcher.num_thrown_away == 2


def test_what_a_dead_generator_had_goes_to_others(dispatcher):
    dispatcher.publish(0)
    dispatcher.hand_out("dead", 2, 0)
    dispatcher.answer("dead", 0, 0, "before it died")
    dispatcher.lose("dead")
    assert numbers(dispatcher.hand_out("other", 2, 1)) == [1, 2]


def test_answers_that_are_too_old_for_their_step_are_given_anew(dispatcher):
    dispatcher.publish(0)
    dispatcher.hand_out("a", 2, 0)
    dispatcher.answer("a", 0, 0, "old")
    # The run trains the prompt later than it was read for.
    assert dispatcher.take(0, 2) is None
    dispatcher.publish(2)
    assert numbers(dispatcher.hand_out("b", 1, 0)) == [0]
    # Of a generator that was handed the other prompt by the first policy.
    dispatcher.take(1, 2)
    dispatcher.answer("a", 1, 0, "old")
    assert dispatcher.num_thrown_away == 2
    dispatcher.answer("b", 0, 2, "new")
    assert dispatcher.take(0, 2) == (2, "new")


def test_policies_stay_while_somebody_may_read_them(dispatcher):
    dispatcher.publish(0)
    dispatcher.hand_out("a", 1, 0)
    dispatcher.publish(1)
    assert dispatcher.versions_in_use() == {0, 1}
    dispatcher.answer("a", 0, 0, "")
    assert dispatcher.versions_in_use() == {1}


def test_a_run_that_goes_back_begins_with_nothing(dispatcher):
    dispatcher.publish(0)
    dispatcher.hand_out("a", 2, 0)
    dispatcher.forget()
    dispatcher.answer("a", 0, 0, "of weights that are no more")
    assert dispatcher.hand_out("a", 9, 0) == []
    dispatcher.add(0, 0, "again")
    dispatcher.publish(0)
    assert dispatcher.hand_out("a", 9, 0) == [(0, "again")]


def test_prompts_that_no_step_has_asked_for_are_dropped(dispatcher):
    dispatcher.drop_before(3)
    dispatcher.publish(0)
    assert numbers(dispatcher.hand_out("a", 9, 0)) == [3]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_each_prompt_is_used_once_and_not_too_old(seed):
    draw, steps, per_step, staleness = random.Random(seed), 12, 3, seed % 3
    dispatcher = Dispatcher(max_staleness=staleness, answer_seconds=5)
    at: dict[str, list[tuple[int, int]]] = {name: [] for name in "abc"}
    used, clock = [], 0.0
    for step in range(steps):
        dispatcher.publish(step)
        for number in range(step * per_step, (step + 1 + staleness) * per_step):
            dispatcher.add(number, number // per_step, None) if number not in dict(used) else None
        missing = list(range(step * per_step, (step + 1) * per_step))
        while missing:
            clock += 1
            name = draw.choice("abc")
            event = draw.random()
            if event < 0.1:
                dispatcher.lose(name)
                at[name] = []
            elif event < 0.5 and at[name]:
                number, version = at[name].pop()
                dispatcher.answer(name, number, version, None)
            elif event < 0.9 and not at[name]:
                at[name] = [(number, step) for number, _ in dispatcher.hand_out(name, 2, clock)]
            for number in list(missing):
                answers = dispatcher.take(number, step)
                if answers is not None:
                    missing.remove(number)
                    used.append((number, step))
                    assert step - staleness <= answers.version <= step
    assert sorted(used) == [(number, number // per_step) for number in range(steps * per_step)]
