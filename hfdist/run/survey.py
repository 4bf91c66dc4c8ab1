"""What becomes of some examples of the data: how long they are, how much is learned of them, how many are lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from hfdist.config.data import DataConfig, Packing
from hfdist.config.task import TaskConfig
from hfdist.data import Corpus
from hfdist.data.documents.token_reader import Documents, open_token_cache
from hfdist.data.marks import are_targets
from hfdist.data.order.records import Status
from hfdist.data.tokenization.encoders import Encoders
from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.run.preview import name_of_targets

_SURVEYED_DOCUMENTS = 256


class _Surveyed(NamedTuple):
    """One example as it is read for the training."""

    tokens: NDArray[np.integer]
    status: int
    num_cut: int
    """Tokens that were cut off."""


def survey(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    task: TaskConfig,
    tokens_per_step: int = 0,
    images: ImageTokens | None = None,
) -> str:
    """Say what becomes of some examples: their length, the share of targets, and how many are cut or left out.

    Also that a step reads all of them several times, if it does; 0 tokens a step: not known.
    """
    documents = Documents(corpus, Encoders.of(tokenizer, config, images), open_token_cache(config), config)
    found = list(islice(_read(corpus, documents), _SURVEYED_DOCUMENTS))
    trained = [example for example in found if example.status == Status.trained]
    num_tokens = sum(len(example.tokens) for example in trained)
    share = 100 * sum(int(are_targets(example.tokens).sum()) for example in trained) / max(num_tokens, 1)
    mean = num_tokens / max(len(trained), 1)
    said = f"{len(found)} examples: {mean:,.1f} tokens on average, {share:.1f} % of them {name_of_targets(task)}"
    said += _describe_losses(found, config.sequence_length)
    all_tokens = num_tokens * corpus.num_documents / max(len(found), 1)
    times = tokens_per_step / max(all_tokens, 1)
    if times > 1 and config.packing is not Packing.none:
        said += f"; a step of {tokens_per_step:,} tokens reads all of them {times:,.1f} times (train.global_batch_size)"
    return said


def _read(corpus: Corpus, documents: Documents) -> Iterator[_Surveyed]:
    """Give the examples of all sources, mixed as in the training."""
    for block in corpus.mixed_blocks():
        for chunk in documents.chunks(np.array(block)):
            yield from map(_Surveyed, chunk.views(), chunk.fates, chunk.cut_tokens)


def _describe_losses(examples: list[_Surveyed], sequence_length: int) -> str:
    """Say how many examples are cut or left out; "": none."""
    counts = Counter(int(example.status) for example in examples)
    num_cut = sum(example.status == Status.trained and example.num_cut > 0 for example in examples)
    notes = [
        (num_cut, f"cut to {sequence_length:,} tokens"),
        (counts[Status.too_long], "left out as too long"),
        (counts[Status.no_target], "left out without a target"),
        (counts[Status.bad], "left out as bad"),
    ]
    return "".join(f"; {count} {what}" for count, what in notes if count)
