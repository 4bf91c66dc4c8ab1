"""The audit: true ledgers pass in every packing, and each kind of planted damage is found and named."""

from __future__ import annotations

import dataclasses
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from hfdist.config.audit import parse_request
from hfdist.config.data import BadRows, Packing, WeightChange
from hfdist.data import Cursor, Ledger
from hfdist.data.audit.audit import audit
from hfdist.data.audit.findings import Kind
from hfdist.data.audit.ledger import read_ledger
from hfdist.data.audit.steps import StepReader, escape
from hfdist.data.cache.tokens import TokenCache
from hfdist.data.documents import Documents
from hfdist.data.records import Fate
from hfdist.errors import ConfigError, DataError
from tests.unit.data.corpora import tokenizer
from tests.unit.data.streams import PACKINGS, Run, memory_config, memory_corpus

LANES = GLOBAL_BATCH = 12
ROWS = {
    "a": ["", *(f"{n} " * (1 + n % 23) for n in range(89))],
    "b": [f"b{n}, " * (1 + n % 41) for n in range(69)] + ["long " * 300],
}
SETTINGS = {
    "one": {},
    "weights": {"weights": {"a": 2.0, "b": 1.0}, "anneal": [WeightChange(step=20, weights={"a": 1.0, "b": 3.0})]},
    "limits": {"weights": {"a": 1.0, "b": 3.0}, "epochs": {"a": 2, "b": 1}},
}


class Past:
    """A run of 60 steps, saved now and then, killed twice, each time going on with other ranks; what is left of it."""

    def __init__(self, folder, packing, name, start=None):
        self.config = memory_config(folder, packing=packing, sequence_length=64, **SETTINGS[name])
        self.corpus = memory_corpus(self.config, **ROWS)
        self.cursors = {}
        step, state = 0, start
        for data_size, saves, killed_after in ((1, [15, 22], 3), (3, [31], 2), (4, [60], 0)):
            run = Run(
                self.corpus,
                self.config,
                data_size,
                state,
                ledger=lambda: Ledger(folder / "ledger", self.corpus, BadRows.error),
            )
            for save in saves:
                for step in range(step + 1, save + 1):  # noqa: B020
                    run.step()
                run.flush()
                state = run.state()
                self.cursors[step + self.before(start)] = Cursor.from_json(state)
            for _ in range(killed_after):
                run.step()
            run.flush()
        self.plan, self.identity = run.streams[0].plan, run.state()["identity"]
        self.ledger = read_ledger(folder / "ledger", LANES)
        self.state = state

    @staticmethod
    def before(start):
        return 0 if start is None else start["samples"] // GLOBAL_BATCH

    def audit(self, ledger=None, cursors=None):
        return audit(
            self.ledger if ledger is None else ledger,
            self.corpus,
            self.plan,
            self.cursors if cursors is None else cursors,
            identity=self.identity,
            global_batch_size=GLOBAL_BATCH,
        )


@pytest.fixture(scope="module")
def past(tmp_path_factory):
    """Gives a run; each is made once."""
    return cache(lambda packing, name: Past(tmp_path_factory.mktemp("run"), packing, name))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("packing", PACKINGS)
class TestTrueLedgers:
    def test_they_pass(self, past, packing, name):
        run = past(packing, name)
        audited = run.audit()
        assert audited.passed, audited.findings
        assert (audited.first_sample, audited.samples) == (0, 60 * GLOBAL_BATCH)
        assert audited.totals.tokens == sum(int(records["num_tokens"].sum()) for records in run.ledger)
        assert any(Fate.held_out in records["fate"] for records in run.ledger)
        assert max(int(records["epoch"].max()) for records in run.ledger) >= 1

    def test_they_pass_without_checkpoints(self, past, packing, name):
        audited = past(packing, name).audit(cursors={})
        assert audited.passed, audited.findings

    def test_a_run_from_anothers_checkpoint_passes_and_is_known(self, past, packing, name, tmp_path):
        first = past(packing, name)
        run = Past(tmp_path, packing, name, start=first.cursors[15].to_json())
        audited = run.audit()
        assert audited.passed, audited.findings
        assert audited.first_sample == 15 * GLOBAL_BATCH
