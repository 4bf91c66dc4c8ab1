"""The plan that all lanes share, made of the config `data.*`, and a digest of all that decides where a token stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from transformers import PreTrainedTokenizerBase

from hfdist.config.data import DataConfig, Packing, TooLong
from hfdist.data.cache import digest_of
from hfdist.data.documents.corpus import Corpus, Pool
from hfdist.data.order.lane_state import Place
from hfdist.data.order.mixture import Mixture
from hfdist.data.order.shuffle import LaneOrder
from hfdist.data.packing.sequence import Shape
from hfdist.data.packing.windows import RULE
from hfdist.data.tokenization.encoders import Encoders
from hfdist.errors import ConfigError

_FORMAT = 4
"""Raise it when the digest is made of other things, or in another way."""


@dataclass(frozen=True)
class LanePlan:
    """What all lanes share: the order of each pool, the mixture of pools, and how sequences are packed."""

    pools: Sequence[Pool]
    """The pools of documents, each with its own order."""
    orders: Sequence[LaneOrder]
    """The order of each pool's documents."""
    mixture: Mixture
    """What picks the pool of each sequence."""
    packing: Packing
    """How documents become sequences; never `auto`."""
    too_long: TooLong
    """What becomes of a document that is longer than a sequence."""
    shape: Shape
    """The length of a sequence, and the token that fills it up."""
    seed: int
    """The seed of all orders."""

    def is_finished(self, pool: int, lane: int, place: Place) -> bool:
        """Whether a lane has come to the end of a pool: nothing is left of the last epoch that it may have.

        `pool` is the number of the pool, `place` the place where the lane's next sequence would begin in it.
        """
        limit = self.pools[pool].epochs
        if limit is None:
            return False
        last_epoch = limit - 1
        end = (last_epoch, self.orders[pool].lane_length(last_epoch, lane))
        return (place.epoch, place.position) >= end

    @property
    def has_even_turns(self) -> bool:
        """Whether there is one endless pool of token files under `concat`: then lanes take turns without a gap."""
        (first, *others) = self.pools
        return not others and first.epochs is None and first.holds_tokens and self.packing is Packing.concat


def make_plan(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, config: DataConfig, global_batch_size: int | None
) -> LanePlan:
    """Make the plan of the lanes.

    Args:
        corpus: the documents.
        tokenizer: knows the token that fills sequences up.
        config: `data.*`; its packing is not `auto`.
        global_batch_size: sequences in a step of all runs together, by which `data.anneal` counts.

    Raises:
        ConfigError: `data.anneal` without `global_batch_size`.
    """
    if config.anneal and global_batch_size is None:
        raise ConfigError(
            "weights that change at a step need the number of sequences in one",
            where="data.anneal",
            hint="TokenStream(..., global_batch_size=...)",
        )
    # A pool that is the only one has no weight.
    weights = {name: 1.0 if source.weight is None else source.weight for name, source in config.sources.items()}
    phases = [(0, tuple(weights.get(pool.name, 1.0) for pool in corpus.pools))]
    for change in config.anneal:
        first_sample = change.step * (global_batch_size or 0)
        phases.append((first_sample, tuple(change.weights[pool.name] for pool in corpus.pools)))
    fill_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return LanePlan(
        pools=corpus.pools,
        orders=[
            LaneOrder(
                pool.runs,
                lanes=config.lanes,
                key=(config.seed, pool.name),
                first_document=pool.first_document,
            )
            for pool in corpus.pools
        ],
        mixture=Mixture(phases, lanes=config.lanes),
        packing=config.packing,
        too_long=config.too_long,
        shape=Shape(config.longest_row, fill_id),
        seed=config.seed,
    )


def identity_of(corpus: Corpus, encoders: Encoders, config: DataConfig, global_batch_size: int | None) -> str:
    """Give the digest of all that decides which token stands where.

    Args:
        corpus: the documents.
        encoders: make tokens of the documents.
        config: `data.*`; its packing is not `auto`.
        global_batch_size: sequences in a step of all runs together; counts only with `data.anneal`.
    """
    settings = [config.sequence_length, config.packing.value, config.seed, config.lanes]
    if config.too_long is not TooLong.split:
        settings.append(config.too_long.value)
    if config.packing is Packing.best_fit:
        settings.append(RULE)
    tokens = encoders.digest(examples=corpus.has_examples)
    # Epochs do not count, and None stands for them: with another number, each document stays where it is.
    weights = [[name, source.weight, None] for name, source in sorted(config.sources.items())]
    changes: list[object] = []
    if config.anneal:
        changes = [global_batch_size, [asdict(change) for change in config.anneal]]
    return digest_of([_FORMAT, corpus.fingerprint, tokens, *settings, [weights, changes]])
