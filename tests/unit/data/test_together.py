"""Token files read and cut for many lanes at once give what each lane gives by itself."""

import random
import weakref
from dataclasses import replace
from unittest.mock import patch

import datasets
import numpy as np
import pytest

from hfdist.config.data import BadRows, DataConfig, SourceConfig, SourceKind, TooLong
from hfdist.data import TokenStream, open_corpus
from hfdist.data.cursor import Place, Progress
from hfdist.data.documents import Documents, open_token_cache
from hfdist.data.encoders import Encoders
from hfdist.data.lane import open_lanes
from hfdist.data.packing.concat import concat
from hfdist.data.packing.sequence import Shape
from hfdist.data.portion import Portion
from hfdist.data.pretokenize import pretokenize
from hfdist.errors import DataError
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
    with patch.object(documents, "are_token_files", lambda pool: together):
        return open_lanes(plan, documents, progress or {lane: (Progress(),) * len(plan.pools) for lane in range(5)})


def same(ours, theirs):
    (lane, pool, sequence), (other_lane, other_pool, other) = ours, theirs
    assert (lane, pool) == (other_lane, other_pool)
    assert (sequence.next_place, sequence.num_tokens) == (other.next_place, other.num_tokens)
    assert np.array_equal(sequence.rows, other.rows)
    assert np.array_equal(sequence.records, other.records)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sequence_length": 1000},
        {"eval_fraction": 0.5, "quarantine": ["a:00000:3", "b:00000:40"]},
        {"too_long": TooLong.truncate_end, "sequence_length": 64},
        {"too_long": TooLong.drop, "sequence_length": 64},
    ],
)
@pytest.mark.parametrize("turns", ["in turn", "at random"])
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
    behind = {lane: states[lane] for lane in (3, 1, 0, 4, 2)}
    again = lanes_of(config, behind, together=True)
    for number in range(NUM_SEQUENCES, NUM_SEQUENCES + 50):
        for lane in behind:
            same(again[lane].next(number), theirs[lane].next(number))


def test_sources_that_end_and_take_turns(folders):
    config = config_of(folders, sequence_length=400)
    limits = {"a": {"weight": 3.0, "epochs": 2}, "b": {"weight": 1.0, "epochs": 1}}
    config.sources = {name: replace(source, **limits[name]) for name, source in config.sources.items()}
    ours, theirs = (lanes_of(config, None, together=together) for together in (True, False))
    pools = []
    for number in range(NUM_SEQUENCES):
        packed = ours[number % NUM_LANES].next(number)
        same(packed, theirs[number % NUM_LANES].next(number))
        pools.append(packed[1])
    assert {0, 1, None} == set(pools)
    assert pools[-NUM_LANES:] == [None] * NUM_LANES


def test_nothing_to_train_on_is_said(folders):
    config = config_of(folders, too_long=TooLong.drop, sequence_length=1)
    with pytest.raises(DataError, match="no training documents"):
        lanes_of(config, None, together=True)[0].next(0)


def test_tokens_that_are_used_up_are_let_go():
    """Each portion of a text has an array of its own."""
    kept, most = [], []

    def portions():
        for number in range(1000):
            tokens = np.arange(100, dtype=np.int32)
            kept.append(weakref.ref(tokens))
            zeros, one = np.zeros(1, dtype=np.int64), np.array([100])
            yield Place(0, number), Portion(np.array([number]), [tokens], zeros, zeros, one, zeros, zeros, {})
            most.append(sum(one() is not None for one in kept))

    assert sum(1 for _ in concat(portions(), Shape(64, 0))) == 1563
    # 128 sequences are cut together, and those before may still be held.
    assert max(most) <= 2 * 128 * 64 // 100 + 4
