"""Token files read and cut for many lanes at once give what each lane gives by itself."""

import random
import weakref
from unittest.mock import patch

import datasets
import numpy as np
import pytest
import torch

from hfdist.config.data import BadRows, DataConfig, SourceConfig, SourceKind, TooLong
from hfdist.data import TokenStream, open_corpus
from hfdist.data.documents.corpus import Pool
from hfdist.data.documents.token_reader import Documents, open_token_cache
from hfdist.data.order.lane_state import Place, Progress
from hfdist.data.order.runs import Runs
from hfdist.data.order.shuffle import LaneOrder
from hfdist.data.packing.concat import concat
from hfdist.data.packing.sequence import Shape
from hfdist.data.pretokenize import pretokenize
from hfdist.data.sources.document_batch import DocumentBatch
from hfdist.data.stream.lane import open_lanes
from hfdist.data.stream.lane_documents import DocumentIterator
from hfdist.data.stream.ledger import Ledger, read_records, records_file
from hfdist.data.stream.many_lanes import MultiLaneReader
from hfdist.data.tokenization.encoders import Encoders
from hfdist.errors import CheckpointError, DataError
from tests.unit.data.corpora import texts, tokenizer

NUM_LANES, NUM_SEQUENCES = 5, 400


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two of token files, with documents from none to hundreds of tokens."""
    root = tmp_path_factory.mktemp("tokens")
    for name, some in (("a", texts()[:70]), ("b", texts()[70:])):
        cut = [text[: (number * 37 % 11) * 90] for number, text in enumerate(some * 3)]
        config = DataConfig(sources={}, cache_dir=str(root / "cache"))
        corpus = open_corpus(config, {name: datasets.Dataset.from_dict({"text": cut})})
        pretokenize(corpus.shards, tokenizer(), root / name, workers=0, on_bad_rows=BadRows.skip)
    return root


def config_of(folders, **settings):
    sources = {name: SourceConfig(kind=SourceKind.tokens, path=str(folders / name)) for name in ("a", "b")}
    defaults = {"lanes": NUM_LANES, "sequence_length": 48, "eval_fraction": 0.0, "workers": 0}
    return DataConfig(sources=sources, cache_dir=str(folders / "cache"), **(defaults | settings))


def lanes_of(config, progress, *, together):
    corpus = open_corpus(config)
    plan = TokenStream(corpus, tokenizer(), config).plan
    documents = Documents(corpus, Encoders(tokenizer(), config.chat), open_token_cache(config), config)
    with patch.object(Pool, "holds_tokens", together):
        return open_lanes(
            plan, documents, progress or {lane: (Progress(),) * len(plan.pools) for lane in range(config.lanes)}
        )


def same(ours, theirs):
    (lane, pool, sequence), (other_lane, other_pool, other) = ours, theirs
    assert (lane, pool) == (other_lane, other_pool)
    assert (sequence.next_place, sequence.num_tokens) == (other.next_place, other.num_tokens)
    assert (sequence.problems, list(sequence.lengths)) == (other.problems, list(other.lengths))
    assert list(sequence.blanks) == list(other.blanks)
    assert np.array_equal(sequence.rows, other.rows)
    assert np.array_equal(sequence.records, other.records)


@pytest.mark.parametrize(
    ("turns", "settings"),
    [
        ("at random", {}),
        ("in turn", {"sequence_length": 1000}),
        ("at random", {"eval_fraction": 0.5, "quarantine": ["a:00000:3", "b:00000:40"]}),
        ("in turn", {"too_long": TooLong.truncate_end, "sequence_length": 64}),
        ("at random", {"too_long": TooLong.drop, "sequence_length": 64}),
    ],
)
def test_lanes_together_give_what_each_gives_by_itself(folders, settings, turns):
    config, draw = config_of(folders, **settings), random.Random(0)
    ours, theirs = (lanes_of(config, None, together=together) for together in (True, False))
    states = {lane: [Progress()] for lane in range(NUM_LANES)}
    for number in range(NUM_SEQUENCES):
        lane = number % NUM_LANES if turns == "in turn" else draw.choice((0, 0, 0, 1, 2, 3, 4))
        packed = ours[lane].next(number)
        same(packed, theirs[lane].next(number))
        states[lane] = [Progress(packed[2].next_place)]
    # And from inside a document on, in another order of turns.
    after = {lane: states[lane] for lane in (3, 1, 0, 4, 2)}
    again = lanes_of(config, after, together=True)
    for number in range(NUM_SEQUENCES, NUM_SEQUENCES + 50):
        for lane in after:
            same(again[lane].next(number), theirs[lane].next(number))


@pytest.mark.parametrize(
    ("batch_size", "settings"),
    [
        (3, {}),
        (1, {"sequence_length": 1000}),
        (12, {"eval_fraction": 0.5, "quarantine": ["a:00000:3", "b:00000:40"]}),
        (5, {"too_long": TooLong.drop, "sequence_length": 64}),
    ],
)
def test_batches_in_turn_are_those_of_sequences_one_by_one(folders, tmp_path, batch_size, settings):
    """With the same cursor after each batch and the same ledger, whenever these are asked for."""
    config, draw = config_of(folders, **settings), random.Random(0)
    corpus = open_corpus(config)
    ours, theirs = (TokenStream(corpus, tokenizer(), config) for _ in "ab")
    ours.ledger, theirs.ledger = (Ledger(tmp_path / name, corpus, BadRows.error) for name in ("ours", "theirs"))
    assert ours.plan.has_even_turns
    batches, sequences = iter(ours.loader(batch_size=batch_size)), theirs.packed(0, 1)
    for _ in range(NUM_SEQUENCES // max(batch_size, 4)):
        batch, other = next(batches), theirs.next_batch([next(sequences) for _ in range(batch_size)])
        assert all(torch.equal(batch[name], other[name]) for name in other)
        if draw.random() < 0.1:
            assert ours.state_dict() == theirs.state_dict()
        if draw.random() < 0.1:
            ours.ledger.flush()
            theirs.ledger.flush()
            for lane in range(NUM_LANES):
                written = [records_file(stream.ledger.folder, lane).read_bytes() for stream in (ours, theirs)]
                assert written[0] == written[1] != b""
    assert ours.ahead().state_dict() == ours.state_dict() == theirs.state_dict()


def test_a_deal_that_moves_no_lane_forgets_nothing(folders, tmp_path):
    """Of the batches that are read already: islands deal after each exchange, and most times nobody has left."""
    config = config_of(folders)
    corpus = open_corpus(config)
    ours, theirs = (TokenStream(corpus, tokenizer(), config, run=(0, 2)) for _ in "ab")
    ours.ledger = Ledger(tmp_path, corpus, BadRows.error)
    batches, sequences = iter(ours.loader(batch_size=2)), theirs.packed(0, 1)
    for _ in range(9):
        next(batches)
        theirs.next_batch([next(sequences) for _ in range(2)])
        ours.deal(ours.cursor())
        assert ours.state_dict() == theirs.state_dict()
    ours.ledger.flush()
    for lane, state in ours.cursor().lanes.items():
        numbers = set(read_records(tmp_path, lane)["sequence"].tolist())
        assert numbers == set(range(state.sequences))


def test_a_damaged_place_comes_in_its_own_batch(folders):
    config = config_of(folders)
    stream = TokenStream(open_corpus(config), tokenizer(), config)
    state = stream.state_dict()
    state["places"][2][2] = [0, 3, 10**6, *state["places"][2][2][3:]]
    stream.load_state_dict(state)
    batches = iter(stream.loader(batch_size=2))
    next(batches)
    with pytest.raises(CheckpointError, match="after the end of a document"):
        next(batches)
    assert stream.num_samples == 2


def test_a_damaged_place_of_another_lane_is_its_own(folders):
    places = {lane: [Progress(Place(0, 3, 10**6 if lane == 2 else 0))] for lane in range(NUM_LANES)}
    lanes, given = lanes_of(config_of(folders), places, together=True), []
    for number in range(20):
        for lane in (0, 1, 3, 4):
            given.append(lanes[lane].next(number))
        with pytest.raises(CheckpointError, match="after the end of a document"):
            lanes[2].next(number)
    assert len(given) == 80


@pytest.mark.parametrize(("num_epochs", "num_documents"), [(10, 1000), (11, 999), (250, 4)])
def test_when_a_lane_is_barren(num_epochs, num_documents):
    """After 10 epochs and 1,000 documents at the least."""
    per_epoch = -(-num_documents // num_epochs)
    pool = Pool("a", 0, (), None)
    iterator = DocumentIterator(pool, LaneOrder(Runs.of([[per_epoch]]), lanes=1, key=("a",)), 0, Place())
    seen = 0
    with pytest.raises(DataError, match="no training documents"):
        while True:
            count = len(iterator.next_documents(1000))
            iterator.advance(count, count)
            seen += count
    assert seen >= 1000
    assert seen >= 10 * per_epoch
    assert seen - per_epoch < 1000 or seen == 10 * per_epoch
    with pytest.raises(DataError, match="no training documents"):
        iterator.next_documents(1)


def test_short_documents_after_long_ones_are_read_in_few_passes():
    """The mean of those before says nothing of them."""
    lengths = [5000] * 50 + [3] * 20_000
    reads = []

    class Given:
        """Documents of token files, in order."""

        def tokens_at_once(self, numbers):
            reads.append(len(numbers))
            own = np.array(lengths, dtype=np.int64)[numbers]
            zeros = np.zeros_like(own)
            return DocumentBatch(numbers, [np.zeros(5000, dtype=np.uint16)], zeros, zeros, own, zeros, zeros, {})

    def in_order(self, epoch, lane, start, most):
        return np.arange(start, len(lengths))

    order = LaneOrder(Runs.of([[len(lengths)]]), lanes=1, key=("a",))
    together = MultiLaneReader({0: DocumentIterator(Pool("a", 0, (), 1), order, 0, Place())}, Given(), Shape(512, 0))
    with patch.object(LaneOrder, "rest_of_blocks", in_order):
        assert sum(1 for _ in iter(lambda: together.next(0), None)) == -(-sum(lengths) // 512)
    assert len(reads) < 100


def test_tokens_that_are_used_up_are_let_go():
    """Each chunk of a text has an array of its own."""
    kept, most = [], []

    def chunks():
        for number in range(1000):
            tokens = np.arange(100, dtype=np.int32)
            kept.append(weakref.ref(tokens))
            zeros, one = np.zeros(1, dtype=np.int64), np.array([100])
            yield Place(0, number), DocumentBatch(np.array([number]), [tokens], zeros, zeros, one, zeros, zeros, {})
            most.append(sum(one() is not None for one in kept))

    assert sum(1 for _ in concat(chunks(), Shape(64, 0))) == 1563
    # 128 sequences are cut together, and those before may still be held.
    assert max(most) <= 2 * 128 * 64 // 100 + 4
