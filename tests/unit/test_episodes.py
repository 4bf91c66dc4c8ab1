"""Episodes of a real small model in one process: exact tokens, budgets, slow environments, and faults of each kind."""

import itertools
import logging
import random
import threading
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfdist.config.run import RunConfig
from hfdist.config.task import TaskName
from hfdist.data.documents.examples import Example
from hfdist.environments.registry import GROUP
from hfdist.topology import Topology
from hfdist.trainer.generation.gumbel import gumbel_noise, split_seeds
from hfdist.trainer.generation.limits import find_limits
from hfdist.trainer.generation.sampling import Sampler, Sampling
from hfdist.tune.acting import Acting
from tests.distributed.policy_runs import write_model
from tests.packages import install_package

SOURCE = '''
import random
import threading

import torch

from hfdist.environments import Environment, Step, ToolError

meeting, over = threading.Barrier(4), threading.Event()
closed = []


class Steps(Environment):
    """Does in each episode what its row says."""

    def reset(self, row):
        self.kind, self.turn, self.row = row.columns["kind"], 0, row
        if self.kind == "reset raises":
            raise KeyError("no such room")
        if self.kind == "draws":
            random.seed(1)
            torch.manual_seed(1)
        return {"first": "1 2", "long": "1 " * 60}.get(self.kind)

    def step(self, text):
        self.turn += 1
        if self.kind == "meets" and self.turn == 1:
            meeting.wait(20)
        if self.kind == "slow" and self.turn == 1:
            over.wait(20)
        if self.kind == "raises":
            raise ValueError("lost the ball")
        if self.kind == "leaves":
            raise SystemExit(3)
        if self.kind == "hangs":
            threading.Event().wait(60)
        if self.kind == "floods":
            return Step("1 " * 50_000)
        if self.kind == "is nonsense":
            return "higher"
        if self.kind == "has no number":
            return "1", float("nan"), False
        if self.kind == "says nothing":
            return None, 0.0, False
        if self.kind == "is no text":
            return Step("\\ud800")
        if self.turn == 3:
            over.set()
        return Step("3 +", 0.5, self.turn == 3)

    def close(self):
        closed.append(self.row.prompt)
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("model"))
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def play(model, tmp_path, monkeypatch):
    """Play an episode of each kind with the environment of `SOURCE`; give the answers, and what plays them."""
    name = f"steps{next(NUMBERS)}"
    install_package(tmp_path, monkeypatch, name, SOURCE, GROUP, steps="Steps")

    def run(
        kinds, *, greedy=False, max_new_tokens=60, environment="steps", uses_cache=True, slots=3, records=False, **task
    ):
        config = RunConfig()
        config.task.name, config.task.environment = TaskName.grpo, environment
        config.task.max_new_tokens = max_new_tokens
        for key, value in task.items():
            setattr(config.task, key, value)
        own, tokenizer = model
        sampler = Sampler(
            limits=find_limits(own, tokenizer, max_new_tokens),
            sampling=Sampling(),
            topology=Topology(),
            uses_cache=uses_cache,
            records=records,
        )
        acting = Acting(config, tokenizer, sampler, are_chats=False)

        def forward(batch, function, *, as_whole=False):
            with torch.no_grad():
                return [function(own, batch)]

        prompts = [tokenizer(f"{n} + {n} = ")["input_ids"] for n in range(len(kinds))]
        examples = [
            Example(prompt=prompt, reference=[], columns={"kind": kind})
            for prompt, kind in zip(prompts, kinds, strict=True)
        ]
        seeds = None if greedy else SEEDS[: len(kinds)]
        names = [str(n) for n in range(len(kinds))]
        read, answers = acting.answer(examples, names, seeds, forward, rows_at_once=slots)
        return SimpleNamespace(prompts=[one.prompt for one in read], answers=answers, acting=acting)

    return run


NUMBERS = itertools.count()
SEEDS = [3, 2**40, 7, 8, 9, 10, 11, 12]


def test_each_token_is_drawn_by_its_place_or_read_as_it_was_said(model, play):
    own, tokenizer = model
    found = play(["plain", "first", "plain", "", "plain"], records=True)
    said = tokenizer("\n3 +\n")["input_ids"]
    for prompt, answer, seed in zip(found.prompts, found.answers, SEEDS, strict=False):
        assert (answer.num_turns, answer.has_ended, answer.reward, answer.fault) == (3, True, 1.5, None)
        runs = [(drawn, len(list(own))) for drawn, own in itertools.groupby(answer.is_drawn)]
        assert sum(count for drawn, count in runs if not drawn) == 2 * len(said) + 2 * (not runs[0][0])
        keys, recorded = split_seeds([seed]), iter(answer.log_probabilities)
        for place, (token, is_drawn) in enumerate(zip(answer.tokens, answer.is_drawn, strict=True)):
            if not is_drawn:
                continue
            with torch.no_grad():
                logits = own(torch.tensor([prompt + answer.tokens[:place]])).logits[0, -1]
            values = logits.log_softmax(-1)
            assert (values + gumbel_noise(keys, place, len(logits))[0]).argmax().item() == token
            assert next(recorded) == pytest.approx(values[token].item(), abs=1e-5)
        assert not list(recorded)
        # What is said at the end is no longer read.
        assert [turn.role for turn in answer.turns][-6:] == ["assistant", "user"] * 3
    assert len({tuple(answer.tokens) for answer in found.answers}) == 5


def test_neither_slots_nor_a_cache_change_an_episode(play):
    kinds = ["plain", "first", "plain"]
    wanted = [answer.tokens for answer in play(kinds).answers]
    assert [answer.tokens for answer in play(kinds, slots=1).answers] == wanted
    assert [answer.tokens for answer in play(kinds, uses_cache=False).answers] == wanted


def test_environments_run_beside_each_other_and_none_waits_for_a_slow_one(play):
    # Four meet within their first step; the slow one's first step lasts until another episode is over.
    found = play(["meets", "meets", "slow", "meets", "meets"], environment_seconds=25.0)
    assert [answer.fault for answer in found.answers] == [None] * 5
    assert found.answers[2].has_ended
    slow = [play(["plain", "plain", "plain"]).answers[2].tokens, found.answers[2].tokens]
    assert slow[0] == slow[1], "when it goes on does not change what it draws"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("reset raises", "KeyError: 'no such room'"),
        ("long", "the first observation has 60 tokens, and task.max_new_tokens=60 leaves no turn"),
        ("raises", "ValueError: lost the ball"),
        ("leaves", "SystemExit: 3"),
        ("floods", "an observation has 100,000 bytes; at most 65,536"),
        ("is nonsense", "step gives 'higher', and not"),
        ("has no number", "step gives ('1', nan, False), and not"),
        ("says nothing", "gives no observation, and the episode goes on"),
        ("is no text", "UnicodeEncodeError"),
        ("hangs", "no answer within 0.5 s"),
    ],
)
def test_a_fault_costs_its_own_episode_and_is_named_once(play, caplog, kind, why):
    seconds = 0.5 if kind == "hangs" else 30.0
    before = set(threading.enumerate())
    with caplog.at_level(logging.WARNING):
        found = play(["plain", kind, kind, "plain"], environment_seconds=seconds)
    sound, failed = found.answers[::3], found.answers[1:3]
    assert [(answer.fault, answer.reward, answer.has_ended) for answer in sound] == [(None, 1.5, True)] * 2
    assert all(why in answer.fault and answer.reward == 0 for answer in failed)
    assert found.acting.figures(found.answers)["failed_episodes"] == [0, 1, 1, 0]
    [record] = caplog.records
    assert "steps has failed in 2 of 4 episodes" in record.getMessage()
    assert "'1 + 1 ='" in record.getMessage()
    assert why in record.getMessage()
    # One of an earlier test may end meanwhile.
    left = set(threading.enumerate()) - before
    assert len(left) == (2 if kind == "hangs" else 0), "but for those that hang, none is left"


def test_an_episode_keeps_to_its_budgets(play):
    assert [answer.num_turns for answer in play(["plain"] * 3, max_turns=2).answers] == [2, 2, 2]
    lengths = set()
    for most in range(1, 40, 9):
        for answer in play(["plain"] * 3, max_new_tokens=most).answers:
            lengths.add(len(answer.tokens))
            assert len(answer.tokens) <= most
            assert answer.is_drawn[-1], "what is read is followed by something drawn"
            assert answer.has_ended is (answer.num_turns == 3 and answer.reward == 1.5)
    assert len(lengths) > 3


def test_an_environment_leaves_no_trace_in_random_numbers(play):
    before = random.getstate(), torch.get_rng_state()
    play(["draws"])
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_lane_that_has_ended_has_no_episode(play):
    acting = play(["plain"]).acting
    _, [answer] = acting.answer([Example(prompt=[], reference=[])], ["x"], [1], None, rows_at_once=1)
    assert (answer.tokens, answer.turns) == ([], [])
