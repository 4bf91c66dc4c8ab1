"""Whatever happens to a run, it reads what the uninterrupted run reads: nothing lost, nothing twice, in the same steps.

Hypothesis steps, saves, kills and resizes a run with other numbers of workers, over sources with weights and with
limits, in every packing. `make interruptions` runs 2,000 examples.
"""

from __future__ import annotations

import collections
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hfdist.config.data import BadRows, Packing, SourceKind, WeightChange
from hfdist.data import open_corpus
from hfdist.data.pretokenize import pretokenize
from hfdist.data.stream.ledger import Ledger, read_records
from tests.unit.data.corpora import tokenizer
from tests.unit.data.streams import PACKINGS, Run, assert_equal, memory_config, memory_corpus

LANES = GLOBAL_BATCH = 12
STEPS = 60
KEY = ("epoch", "document", "of_tokens", "num_tokens")
# Mostly without workers, which are processes.
SIZES_AND_WORKERS = [(1, 0), (2, 0), (3, 0), (4, 0), (6, 0)] * 4 + [(1, 1), (1, 3), (2, 1), (3, 2), (6, 1)]
_CACHE = tempfile.TemporaryDirectory(prefix="hfdist-test-")


TOKENS, ONE_OF_TOKENS = "token files", "token files of one pool"
MIXTURES = {
    "as they are": {},
    "weights": {"weights": {"a": 2.0, "b": 1.0}, "anneal": [WeightChange(step=20, weights={"a": 1.0, "b": 3.0})]},
    # Lanes finish the first two at different times, and then share out differently.
    "limits": {"weights": {"a": 1.0, "b": 2.0, "c": 3.0}, "epochs": {"a": 1, "b": 2}},
    TOKENS: {"weights": {"a": 2.0, "b": 1.0}, "epochs": {"b": 2}},
    ONE_OF_TOKENS: {"weights": {"a": None, "b": None}},
}
TEXTS = {
    "a": [f"{n} " * (1 + n % 23) for n in range(90)],
    "b": [f"b{n}, " * (1 + n % 41) for n in range(70)],
    "c": [f"c {n} " * (1 + n % 17) for n in range(120)],
}


@cache
def setting(packing, mixture):
    """Config, corpus and the uninterrupted run of it."""
    config = memory_config(_CACHE.name, packing=packing, sequence_length=64, **MIXTURES[mixture])
    corpus = memory_corpus(config, **{name: TEXTS[name] for name in MIXTURES[mixture].get("weights", "ab")})
    if mixture in (TOKENS, ONE_OF_TOKENS):
        corpus = as_token_files(config, corpus)
    folder = Path(_CACHE.name) / f"reference-{packing.value}-{mixture}"
    run = Run(corpus, config, 1, ledger=lambda: Ledger(folder, corpus, BadRows.error))
    in_columns = mixture == ONE_OF_TOKENS and packing is Packing.concat
    assert run.streams[0].plan.has_even_turns == in_columns
    batches = [run.step() for _ in range(STEPS)]
    run.flush()
    assert max(int(np.max(read_records(folder, lane)["epoch"])) for lane in range(LANES)) >= 1
    return config, corpus, batches, folder


def as_token_files(config, corpus):
    """The same documents, tokenized beforehand; the config's sources are now these."""
    for name, source in config.sources.items():
        folder = Path(_CACHE.name) / "tokens" / name
        if not folder.exists():
            shards = [shard for shard in corpus.shards if shard[0] == name]
            pretokenize(shards, tokenizer(), folder, workers=0, on_bad_rows=BadRows.error)
        source.kind, source.path = SourceKind.tokens, str(folder)
    return open_corpus(config)


class Interruptions(RuleBasedStateMachine):
    """A run that is saved, killed and resized."""

    @initialize(packing=st.sampled_from(PACKINGS), mixture=st.sampled_from(sorted(MIXTURES)))
    def begin(self, packing, mixture):
        self.config, self.corpus, self.reference, self.whole = setting(packing, mixture)
        self.folder = tempfile.TemporaryDirectory(prefix="hfdist-test-")
        self.saved, self.num_saved, self.num_done = None, 0, 0
        self.start(1, 0)

    def start(self, data_size, workers):
        self.config.workers = workers
        self.run = Run(self.corpus, self.config, data_size, self.saved, ledger=self.ledger)
        if self.saved is None:
            for stream in self.run.streams:
                stream.ledger.go_back(dict.fromkeys(stream.lanes, 0))

    def ledger(self):
        return Ledger(Path(self.folder.name), self.corpus, BadRows.error)

    @precondition(lambda self: self.num_done < STEPS)
    @rule(steps=st.integers(1, 12))
    def step(self, steps):
        for expected in self.reference[self.num_done : self.num_done + steps]:
            assert_equal(self.run.step(), expected)
            self.num_done += 1

    @rule()
    def save(self):
        self.run.flush()
        self.saved, self.num_saved = self.run.state(), self.num_done

    @rule()
    def write_the_ledger_but_be_killed_before_the_checkpoint(self):
        self.run.flush()

    @rule(size_and_workers=st.sampled_from(SIZES_AND_WORKERS))
    def kill_and_go_on(self, size_and_workers):
        self.num_done = self.num_saved
        self.start(*size_and_workers)

    def teardown(self):
        if not hasattr(self, "run"):
            return
        self.save()
        for lane in range(LANES):
            ours, theirs = read_records(Path(self.folder.name), lane), read_records(self.whole, lane)
            assert ours.tolist() == theirs[theirs["sequence"] < self.num_done].tolist()
        self.check_once()
        self.run = None
        self.folder.cleanup()

    def check_once(self):
        """Within an epoch no token comes twice."""
        tokens = collections.Counter()
        for lane in range(LANES):
            for *key, num_tokens in read_records(Path(self.folder.name), lane)[list(KEY)].tolist():
                tokens[tuple(key)] += num_tokens
        assert all(read <= total for (_, _, total), read in tokens.items())


def examples(max_examples):
    return settings(
        max_examples=max_examples,
        stateful_step_count=15,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        derandomize=True,
    )


class TestInterruptions(Interruptions.TestCase):
    settings = examples(40)


@pytest.mark.many
@pytest.mark.timeout(3600)
class TestManyInterruptions(Interruptions.TestCase):
    settings = examples(2000)
