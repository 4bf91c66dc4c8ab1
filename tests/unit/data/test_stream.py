"""The stream: one order for every number of ranks and workers, and a cursor that finds any place again."""

import json

import numpy as np
import pytest
import torch

from hfdist.data import Cursor, TokenStream, build_held_out, open_corpus
from hfdist.data.tokenize import encode
from hfdist.errors import CheckpointError
from tests.unit.data.corpora import files_config, texts, tokenizer, write_txt

GLOBAL_BATCH, STEPS = 12, 9


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return files_config(write_txt(tmp_path_factory.mktemp("txt")), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def corpus(config):
    return open_corpus(config)


class Run:
    """The data ranks of one run, stepped together."""

    def __init__(self, corpus, config, data_size, state=None):
        self.streams = [
            TokenStream(corpus, tokenizer(), config, data_rank=rank, data_size=data_size) for rank in range(data_size)
        ]
        for stream in self.streams:
            if state is not None:
                stream.load_state_dict(state)
        self.batches = [iter(stream.loader(micro_batch_size=GLOBAL_BATCH // data_size)) for stream in self.streams]

    def step(self):
        """One global batch, its sequences in the order of the run."""
        shares = [next(batches) for batches in self.batches]
        return {
            name: torch.stack([share[name] for share in shares], dim=1).flatten(0, 1)
            for name in ("input_ids", "position_ids", "labels")
        }

    def state(self):
        cursors = [Cursor.from_json(stream.state_dict()) for stream in self.streams]
        return json.loads(json.dumps(Cursor.merge(cursors).to_json()))


@pytest.fixture(scope="module")
def reference(corpus, config):
    run = Run(corpus, config, 1)
    return [run.step() for _ in range(STEPS)]


def assert_equal(ours, theirs):
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("data_size", [2, 3, 4, 6])
def test_global_batches_do_not_depend_on_the_ranks(corpus, config, reference, data_size):
    run = Run(corpus, config, data_size)
    for expected in reference:
        assert_equal(run.step(), expected)


@pytest.mark.parametrize(("data_size", "workers"), [(1, 1), (1, 2), (1, 3), (2, 2), (3, 3)])
def test_global_batches_do_not_depend_on_the_workers(corpus, config, reference, data_size, workers):
    config.workers = workers
    try:
        run = Run(corpus, config, data_size)
        for expected in reference:
            assert_equal(run.step(), expected)
    finally:
        config.workers = 0


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (4, 3), (2, 6), (6, 1), (3, 4)])
@pytest.mark.parametrize("stop", [1, 4, 8])
def test_a_stopped_run_goes_on_at_any_number_of_ranks(corpus, config, reference, sizes, stop):
    before = Run(corpus, config, sizes[0])
    for expected in reference[:stop]:
        assert_equal(before.step(), expected)
    after = Run(corpus, config, sizes[1], before.state())
    for expected in reference[stop:]:
        assert_equal(after.step(), expected)


def test_the_cursor_counts_what_was_handed_out_and_not_what_was_read_ahead(corpus, config):
    config.workers = 2
    try:
        run = Run(corpus, config, 1)
        run.step()
        state = run.state()
    finally:
        config.workers = 0
    plain = Run(corpus, config, 1)
    plain.step()
    assert state == plain.state()
    assert state["samples"] == GLOBAL_BATCH


def test_the_cursor_is_small(corpus, config):
    config.lanes = 48
    try:
        run = Run(corpus, config, 1)
        for _ in range(5):
            run.step()
        assert len(json.dumps(run.state())) < 4096
    finally:
        config.lanes = 12


def test_every_training_token_is_read_exactly_once_an_epoch(corpus, config):
    """Read on until every lane is in its second epoch, and compare the documents with the corpus."""
    stream = TokenStream(corpus, tokenizer(), config)
    found = {lane: [] for lane in range(config.lanes)}
    batches = iter(stream)
    epochs = {}
    sample = 0
    while min(epochs.get(lane, 0) for lane in range(config.lanes)) < 1:
        sequence = next(batches)
        lane = sample % config.lanes
        if epochs.get(lane, 0) == 0:
            found[lane].append(sequence["input_ids"])
        epochs[lane] = stream._places[lane].epoch
        sample += 1
    expected = sorted(encode(tokenizer(), text).tolist() for text in texts() if not corpus.is_held_out(text))
    read = []
    for lane, sequences in found.items():
        tokens = torch.cat(sequences).tolist()
        documents = [tuple(encode(tokenizer(), corpus.text(stream._order.document(0, lane, position))).tolist())
                     for position in range(stream._order.lane_length(0, lane))]  # fmt: skip
        for document in documents:
            if not corpus.is_held_out(tokenizer().decode(document[:-1])):
                assert tuple(tokens[: len(document)]) == document
                tokens = tokens[len(document) :]
                read.append(list(document))
    assert sorted(read) == expected


def test_targets_restart_with_documents(reference):
    for batch in reference:
        is_first = batch["position_ids"] == 0
        inside = batch["labels"] != -100
        assert torch.equal(batch["labels"][inside], batch["input_ids"][inside])
        # A label is ignored only where a document begins.
        assert is_first[~inside].all()
    assert any((batch["labels"] == -100).any() for batch in reference)


def test_another_seed_is_another_order(corpus, config, reference):
    config.seed = 1
    try:
        assert not torch.equal(Run(corpus, config, 1).step()["input_ids"], reference[0]["input_ids"])
    finally:
        config.seed = 0


def test_the_global_random_state_is_left_alone(corpus, config):
    config.workers = 1
    try:
        torch.manual_seed(0)
        before = torch.get_rng_state()
        Run(corpus, config, 1).step()
        assert torch.equal(torch.get_rng_state(), before)
    finally:
        config.workers = 0


class TestCursorChecks:
    def test_other_data_settings_are_refused(self, corpus, config):
        state = Run(corpus, config, 1).state()
        config.sequence_length = 16
        try:
            with pytest.raises(CheckpointError, match="have changed since this checkpoint"):
                Run(corpus, config, 1, state)
        finally:
            config.sequence_length = 32

    @pytest.mark.parametrize("damage", [{"format": 9}, {"places": "x"}, {"places": [[0]]}, {"samples": None}])
    def test_damage_is_named(self, corpus, config, damage):
        state = Run(corpus, config, 1).state() | damage
        with pytest.raises(CheckpointError, match="cursor"):
            Cursor.from_json(state)

    def test_missing_lanes_are_refused(self, corpus, config):
        cursors = [Cursor.from_json(stream.state_dict()) for stream in Run(corpus, config, 2).streams]
        with pytest.raises(CheckpointError, match="lanes are missing"):
            Cursor.merge(cursors[:1])


class TestHeldOut:
    def test_it_is_disjoint_from_training_and_duplicates_fall_on_one_side(self, tmp_path, corpus):
        assert corpus.is_held_out("x") == corpus.is_held_out("x")
        share = np.mean([corpus.is_held_out(f"document {n}") for n in range(5000)])
        assert share == pytest.approx(0.1, abs=0.02)

    def test_it_is_packed_from_held_out_documents_and_cached(self, corpus, config):
        held_out = build_held_out(corpus, tokenizer(), config)
        assert len(held_out) == config.eval_sequences
        text = " ".join(t for t in texts() if corpus.is_held_out(t))
        start = held_out[0]["input_ids"][held_out[0]["position_ids"].argmin() : 8]
        assert tokenizer().decode(start) in text
        again = build_held_out(corpus, tokenizer(), config)
        assert all(torch.equal(held_out[k]["input_ids"], again[k]["input_ids"]) for k in range(len(again)))

    def test_none_where_no_fraction_is_held_out(self, corpus, config):
        config.eval_fraction = 0
        try:
            assert build_held_out(corpus, tokenizer(), config) is None
        finally:
            config.eval_fraction = 0.1
