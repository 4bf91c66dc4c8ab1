"""The data of a run: its corpus, tokenizer, stream and held-out set, and how many steps they give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hfdist.config.checks.optimizer import check_schedule
from hfdist.config.data import BadRows, RowFormat, cache_dir
from hfdist.config.islands import IslandMethod
from hfdist.config.run import RunConfig
from hfdist.data import (
    Corpus,
    HeldOutSet,
    HeldOutSources,
    Ledger,
    TokenStream,
    build_held_out,
    count_steps,
    open_corpus,
    open_held_out_sources,
)
from hfdist.data.documents.labels import find_labels
from hfdist.data.tokenization.chat_template import adopt_template
from hfdist.data.tokenization.encoders import Encoders
from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.data.tokenization.pair_encoder import adopt_languages
from hfdist.environments.registry import load_environment
from hfdist.errors import ConfigError
from hfdist.models.label_names import own_labels
from hfdist.models.tokenizer import load_tokenizer
from hfdist.run.images import check_images, find_images
from hfdist.topology import Topology
from hfdist.units import count


@dataclass(frozen=True)
class RunData:
    """The opened data of a run, and the tokenizer that reads them."""

    corpus: Corpus
    tokenizer: PreTrainedTokenizerBase
    stream: TokenStream
    """Training batches of this data rank."""
    held_out: HeldOutSet | HeldOutSources | None
    """Sequences of the evaluations; None: nothing is held out."""
    images: ImageTokens | None = None
    """The tokens that images of rows become; None: rows have none."""

    def describe(self, unit: str) -> str:
        """Give the line on the data that a run starts with; `unit` is what a row is called."""
        return (
            f"{', '.join(self.corpus.source_names)}: {count(self.corpus.num_documents, unit)}; "
            f"tokenizer of {len(self.tokenizer):,}; {len(self.held_out or ()):,} held-out sequences"
        )


def make_cache(config: RunConfig) -> Path:
    """Make the folder that tokenizers and indexes are cached in, and give its path."""
    folder = cache_dir(config.data)
    with writing("data.cache_dir", folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def build_data(config: RunConfig, topology: Topology, architecture: PreTrainedConfig) -> RunData:
    """Open what `config` names, for the data rank of `topology`; rows with images or labels change `config.data`.

    Raises:
        ConfigError, DataError: sources that are missing, unreadable or too small; images that the model or the layout
            does not take.
    """
    folder = make_cache(config)
    check_images(config, architecture)
    with writing("data.cache_dir", folder):
        corpus = open_corpus(config.data)
        tokenizer = load_tokenizer(
            config.model, corpus_id=corpus.fingerprint, texts=corpus.training_texts, cache_dir=folder
        )
        images = find_images(config, corpus, architecture, tokenizer)
        adopt_template(tokenizer, config.data.chat)
        adopt_languages(tokenizer, config.data.pairs)
        if config.task.environment is not None and not config.data.chat.tools:
            # Set before the config is written down: prompts describe the tools.
            config.data.chat.tools = list(load_environment(config.task).tools)
        if config.data.format in (RowFormat.labelled, RowFormat.tagged):
            # Set before the config is written down: a label's place in the list is its number.
            config.data.labels = find_labels(corpus, config.data, known=own_labels(architecture))
        example_sources = [source for source in corpus.sources.values() if source.gives_examples]
        Encoders.of(tokenizer, config.data, images).check(shard for source in example_sources for shard in source)
        held_out = _hold_out(config, corpus, tokenizer, images)
    stream = _open_stream(config, topology, corpus, tokenizer).read_images(images)
    # Before the config is written down: the stream has settled `auto`.
    config.data.packing = stream.config.packing
    stream.tells_images = images is not None and config.task.name.traits.has_reference
    stream.tells_origins = config.task.name.traits.hides_tokens
    stream.may_begin_anew = config.checkpoint.allow_changes
    if topology.is_first_of_replica:
        # All ranks of a model replica read the same data: only one of them writes the ledger.
        stream.ledger = Ledger(config.run.folder.ledger, corpus, config.data.on_bad_rows)
    return RunData(corpus, tokenizer, stream, held_out, images)


def _hold_out(
    config: RunConfig, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, images: ImageTokens | None
) -> HeldOutSet | HeldOutSources | None:
    """Open the sequences of evaluations: of sources of their own, or documents that the training leaves out."""
    one_each = config.task.name.traits.pads_documents
    if config.data.eval_sources:
        return open_held_out_sources(tokenizer, config.data, images, one_each=one_each)
    return build_held_out(corpus, tokenizer, config.data, images, one_each=one_each)


def _open_stream(
    config: RunConfig, topology: Topology, corpus: Corpus, tokenizer: PreTrainedTokenizerBase
) -> TokenStream:
    """Open the training stream of this data rank, or of this data rank of an island."""
    islands = config.islands
    data_rank, data_size, run = topology.data_rank, topology.data, (islands.index, islands.shares)
    if islands.method is IslandMethod.parameter_server:
        # There are no rounds at which lanes could be dealt: the data ranks of all islands read as those of one run.
        data_rank = data_rank * islands.shares + islands.index
        data_size, run = data_size * islands.shares, (0, 1)
    return TokenStream(
        corpus,
        tokenizer,
        config.data,
        data_rank=data_rank,
        data_size=data_size,
        global_batch_size=islands.shares * config.train.global_batch_size,
        run=run,
    )


def count_max_steps(
    config: RunConfig, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, images: ImageTokens | None = None
) -> int:
    """Give the number of steps: the lower of `train.max_steps` and what `train.epochs` takes; either may be null."""
    train = config.train
    if train.epochs is None:
        assert train.max_steps is not None  # checked with the config
        return train.max_steps
    data = config.data
    if data.quarantine:
        # Quarantined rows count too: a resumed run may take out more rows, and its learning rates must not change.
        # Bad ones have no tokens, and only the run itself stops at those that are not named.
        data = replace(data, quarantine=[], on_bad_rows=BadRows.skip)
        corpus = open_corpus(data)
    max_steps = count_steps(
        corpus,
        tokenizer,
        data,
        global_batch_size=train.global_batch_size,
        at_most=train.max_steps,
        images=images,
    )
    check_schedule(config, max_steps)
    return max_steps


@contextmanager
def writing(key: str, folder: str | Path) -> Iterator[None]:
    """Turn an OSError into a ConfigError that names the key of the folder."""
    try:
        yield
    except OSError as error:
        what = f"the folder cannot be used: {error.strerror or error}"
        raise ConfigError(what, where=key, found=folder, allowed="a writable folder") from error
