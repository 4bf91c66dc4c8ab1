"""Steps of some passes over the data: counted beforehand, as many as a run then takes."""

import datasets
import pytest

from hfdist.config.data import Packing
from hfdist.data import count_steps, open_corpus
from hfdist.errors import DataError
from tests.unit.data.corpora import tokenizer
from tests.unit.data.streams import Run, memory_config, memory_corpus

GLOBAL_BATCH = 12


def counted(corpus, config, at_most=None):
    return count_steps(corpus, tokenizer(), config, global_batch_size=GLOBAL_BATCH, at_most=at_most)


def taken(corpus, config, data_size):
    """Steps that a run takes: batches with a target, until all ranks have ended."""
    run, steps = Run(corpus, config, data_size, global_batch=GLOBAL_BATCH), 0
    while not all(stream.has_ended for stream in run.streams):
        steps += bool((run.step()["labels"] >= 0).any())
    return steps


@pytest.mark.parametrize(("packing", "epochs"), [(Packing.concat, 2), (Packing.best_fit, 1), (Packing.none, 1)])
def test_a_run_takes_just_as_many_on_any_number_of_ranks(tmp_path, packing, epochs):
    config = memory_config(tmp_path, epochs={"a": epochs, "b": epochs}, packing=packing)
    corpus = memory_corpus(config)
    steps = counted(corpus, config)
    assert steps > epochs
    assert {taken(corpus, config, data_size) for data_size in (1, 4)} == {steps}


def test_they_are_counted_once(tmp_path, caplog):
    caplog.set_level("INFO")
    config = memory_config(tmp_path, epochs={"a": 1, "b": 1})
    corpus = memory_corpus(config)
    first = counted(corpus, config)
    assert "counting the steps" in caplog.text
    caplog.clear()
    assert counted(corpus, config) == first
    assert not caplog.text
    other = memory_config(tmp_path, epochs={"a": 1, "b": 1}, seed=1)
    counted(memory_corpus(other), other)
    assert "counting the steps" in caplog.text


def test_other_ends_are_counted_anew(tmp_path):
    """In one cache: the same stream, but for its end."""
    counts = []
    for epochs in (1, 2):
        config = memory_config(tmp_path, epochs={"a": epochs, "b": epochs})
        counts.append(counted(memory_corpus(config), config))
    assert counts[0] < counts[1]
    assert counted(memory_corpus(config), config, at_most=2) == 2 < counts[1]


def test_data_without_a_target_are_refused(tmp_path):
    config = memory_config(tmp_path, epochs={"a": 1}, eval_fraction=0.0)
    corpus = open_corpus(config, {"a": datasets.Dataset.from_dict({"text": [""] * 20})})
    with pytest.raises(DataError, match="nothing to learn from"):
        counted(corpus, config)
