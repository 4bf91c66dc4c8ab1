"""What becomes of some examples of the data: how long they are, how much is learned of them, how many are lost."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
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
    read = (chunk for block in corpus.mixed_blocks() for chunk in documents.chunks(np.array(block)))
    rows = (row for chunk in read for row in zip(chunk.views(), chunk.fates, chunk.cut_tokens, strict=True))
    found = list(islice(rows, _SURVEYED_DOCUMENTS))
    trained = [(tokens, cut_tokens) for tokens, fate, cut_tokens in found if fate == Status.trained]
    num_tokens = sum(len(tokens) for tokens, _ in trained)
    share = 100 * sum(int(are_targets(tokens).sum()) for tokens, _ in trained) / max(num_tokens, 1)
    fates = Counter(int(fate) for _, fate, _ in found)
    notes = [
        (sum(int(cut_tokens > 0) for _, cut_tokens in trained), f"cut to {config.sequence_length:,} tokens"),
        (fates[Status.too_long], "left out as too long"),
        (fates[Status.no_target], "left out without a target"),
        (fates[Status.bad], "left out as bad"),
    ]
    lost = "".join(f"; {count} {what}" for count, what in notes if count)
    mean = num_tokens / max(len(trained), 1)
    all_tokens = num_tokens * corpus.num_documents / max(len(found), 1)
    times = tokens_per_step / max(all_tokens, 1)
    if times > 1 and config.packing is not Packing.none:
        lost += f"; a step of {tokens_per_step:,} tokens reads all of them {times:,.1f} times (train.global_batch_size)"
    return f"{len(found)} examples: {mean:,.1f} tokens on average, {share:.1f} % of them {name_of_targets(task)}{lost}"
