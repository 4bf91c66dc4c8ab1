"""How many steps a run takes: as many as it is told, or as its passes over the data take."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from hfdist.config.checks.values import check_schedule
from hfdist.config.run import RunConfig
from hfdist.data import Corpus, count_steps, open_corpus


def count_max_steps(config: RunConfig, corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> int:
    """Give the number given, or as many steps as the epochs take, if those are fewer.

    Raises:
        ConfigError: the warm-up is longer than that.
        DataError: there is nothing to learn from.
    """
    train = config.train
    if train.epochs is None:
        assert train.max_steps is not None  # checked with the config
        return train.max_steps
    data = replace(config.data, quarantine=[])
    if config.data.quarantine:
        # Counted with them, as rows may be taken out while a run goes on, whose learning rates must stay.
        corpus = open_corpus(data)
    max_steps = count_steps(corpus, tokenizer, data, global_batch_size=train.global_batch_size, at_most=train.max_steps)
    check_schedule(config, max_steps)
    return max_steps
