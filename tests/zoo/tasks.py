"""Try a type with a task's head: against the class's own loss, over ranks that shard it, and as a saved folder.

the type's default config -> what a run asks of it -> a small model -> its own loss    hfdist's loss      one process
                                                                    -> FSDP2, two ranks                   ranks
                                                                    -> a folder, opened by its own class  saved
"""

from __future__ import annotations

import copy
import functools
import tempfile
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hfdist.apart import Limits, confine
from hfdist.config.batch import IGNORED
from hfdist.config.data import LabelsConfig
from hfdist.config.model import ModelConfig
from hfdist.config.task import Head, TaskConfig, TaskName
from hfdist.errors import ConfigError, first_line
from hfdist.models.encoders import check_reads_texts
from hfdist.models.flops import num_parameters
from hfdist.models.heads import HEADS, IMAGE_TEXT, head_class
from hfdist.models.image_text import may_read_images, read_text_alone
from hfdist.models.probing import loss_of_states, make_of_config
from hfdist.models.shrink import shrink
from hfdist.models.target_loss import check_target_loss, fill_special_ids
from hfdist.models.tokenizer import train_bpe
from hfdist.strategies.from_python import make_strategy
from hfdist.testing import RankFailed, run_ranks
from hfdist.tune.classify import Classification
from hfdist.tune.labelled_texts import IDS, MASK
from hfdist.tune.masked import MaskedTokens
from hfdist.tune.seq2seq import SequenceToSequence
from tests.zoo.hub_files import WRONG, how_saved
from tests.zoo.models import FIELDS, special_token_ids, switch_off
from tests.zoo.sharding import NUM_MICROBATCHES, Sharded, compare_sharded
from tests.zoo.splitting import TOLERANCE, Batch, compare_gradients, compare_losses, model_loss, run_whole

TEXT_HEADS = (Head.masked, Head.labels, Head.token_labels, Head.targets)
"""Those whose types are tried. `Head.none`, of embeddings, is tried with all of these types."""
NUM_RANKS = 2
MOST_PARAMETERS = 50_000_000
"""Of a small model that is tried."""
_TOKENS = (16, 11)
"""Of the texts of a batch."""
_LIMITS = Limits(cpu_seconds=60, memory_bytes=8 * 2**30)
_SECONDS = 600.0
_LONGEST_REASON = 160


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What came of a type with a head."""

    refused: str = ""
    """What a run says of it before it trains."""
    missing: str = ""
    """Why it could not be tried."""
    failed: str = ""
    """What hfdist raises where the class itself computes a loss."""
    loss_difference: float = 0.0
    gradient_difference: float = 0.0
    """Of hfdist's loss from the class's own, on one process."""
    sharded: str = ""
    """Verdict under FSDP2."""
    sharded_gradient_difference: float = 0.0
    saved: str = ""
    """How it is saved; see `how_saved`."""

    @property
    def reason(self) -> str:
        """Why there is nothing to compare; empty: there is."""
        return self.refused or self.missing or self.failed

    @property
    def verdict(self) -> str:
        """`exact`, `refused`, `not yet`, or `wrong`."""
        if self.refused or self.missing:
            return "refused" if self.refused else "not yet"
        if self.failed:
            return "wrong"
        # Also where one is no number.
        is_exact = all(one <= TOLERANCE for one in (self.loss_difference, self.gradient_difference))
        return "exact" if is_exact and self.sharded == "exact" and self.saved != WRONG else "wrong"


def types_of(head: Head) -> list[str]:
    """List the types of transformers that have a class with this head; of `Head.tokens` those of image and text."""
    if head is Head.tokens:
        return sorted(IMAGE_TEXT.by_type)
    if head is Head.none:
        return sorted({kind for other in TEXT_HEADS for kind in HEADS[other].by_type} & {*HEADS[head].by_type})
    return sorted(HEADS[head].by_type)


def try_apart(model_type: str, head: Head) -> Tried:
    """Try a type in processes of its own, with limits of time and memory."""
    try:
        (alone,) = run_ranks(_try_alone, 1, model_type, head, timeout_seconds=_SECONDS)
    except RankFailed as error:
        return Tried(missing=short(f"its process ends: {first_line(error.__cause__ or error)}"))
    found: Tried = alone
    if found.reason:
        return found
    try:
        sharded: list[Sharded] = run_ranks(_try_sharded, NUM_RANKS, model_type, head, timeout_seconds=_SECONDS)
    except RankFailed as error:
        return replace(found, failed=short(f"over ranks: {first_line(error.__cause__ or error)}"))
    worst = max(sharded, key=lambda one: (one.verdict != "exact", one.gradient_difference))
    return replace(found, sharded=worst.verdict, sharded_gradient_difference=worst.gradient_difference)


def _try_alone(model_type: str, head: Head) -> Tried:
    confine(_LIMITS)
    try:
        architecture = AutoConfig.for_model(model_type, **FIELDS.get(model_type, {}))
    except Exception as error:  # whatever a config raises on its own defaults
        return Tried(missing=short(f"its default config is refused: {first_line(error)}"))
    try:
        ask(architecture, head)
    except ConfigError as error:
        reason = short(f"{error.what}: {error.found}" if head is Head.targets else error.what)
        return Tried(missing=reason) if "small model cannot" in reason else Tried(refused=reason)
    try:
        model = make_small(architecture, head)
        if (size := num_parameters(model)) > MOST_PARAMETERS:
            return Tried(missing=f"its small model has {size:,} parameters")
        # By a copy: some models keep what a forward computes.
        own_loss(head, copy.deepcopy(model), make_batch(model, head, seed=0))
    except Exception as error:  # whatever a model raises that reads more than texts
        return Tried(missing=short(f"{type(error).__name__}: {first_line(error)}"))
    try:
        return try_model(model, head)
    except Exception as error:  # whatever hfdist raises, so that the other types are tried, too
        return Tried(failed=short(f"{type(error).__name__}: {first_line(error)}"))


def _try_sharded(model_type: str, head: Head) -> Sharded:
    confine(_LIMITS)
    model = make_small(AutoConfig.for_model(model_type, **FIELDS.get(model_type, {})), head)
    strategy = make_strategy(sharding="fsdp2", global_batch_size=NUM_MICROBATCHES * NUM_RANKS)
    batches = [make_batch(model, head, seed=seed) for seed in range(NUM_MICROBATCHES * NUM_RANKS)]
    return compare_sharded(model, batches, strategy, loss=functools.partial(own_loss, head))


def ask(architecture: PreTrainedConfig, head: Head) -> None:
    """Ask what a run asks of a type before it trains; ConfigError: it is refused."""
    if head is Head.targets:
        check_target_loss(ModelConfig(type=architecture.model_type), architecture)
    elif head is Head.tokens:
        if not may_read_images(architecture):
            raise ConfigError("it writes by an encoder-decoder, or it has a class for text alone, which is taken")
    else:
        check_reads_texts(architecture, head=head, longest=max(_TOKENS))


def make_small(architecture: PreTrainedConfig, head: Head) -> PreTrainedModel:
    """Make a small model of the type, in train mode without dropout, whose trained weights are random and not zeros."""
    small = shrink(architecture)
    switch_off(small)
    small._attn_implementation = "eager"
    text = small.get_text_config()
    if text.pad_token_id is None:
        # Classes that look for the last token of a text ask for it.
        text.pad_token_id = 0
    if head is Head.targets:
        fill_special_ids(small, 0)
    model = make_of_config(small, head)
    with torch.no_grad():
        # What is frozen a class may compute and leave out of its files, as Marian's positions.
        for parameter in filter(attrgetter("requires_grad"), model.parameters()):
            parameter.add_(torch.randn_like(parameter) * 0.02)
    if head is Head.tokens:
        read_text_alone(model)
    return model.train()


def try_model(model: PreTrainedModel, head: Head) -> Tried:
    """Compare a model's own loss with hfdist's, and its folder with that of `save_pretrained`, opened by its class."""
    batches = [make_batch(model, head, seed=0)]
    own = functools.partial(own_loss, head)
    # Before a forward: some models keep what one computes.
    with tempfile.TemporaryDirectory() as name:
        saved, folder = how_saved(model, Path(name)), Path(name) / "own"
        model.config.save_pretrained(folder)
        opened = head_class(head, model.config).auto.from_pretrained(folder, attn_implementation="eager").train()
    plain = run_whole(model, batches, own)
    ours = run_whole(model, batches, functools.partial(hfdist_loss, head))
    if compare_losses(run_whole(opened, batches, own).losses, plain.losses) > TOLERANCE:
        saved = WRONG
    return Tried(
        loss_difference=compare_losses(ours.losses, plain.losses),
        gradient_difference=compare_gradients(ours.gradients, plain.gradients)[0],
        saved=saved,
    )


def make_batch(model: PreTrainedModel, head: Head, *, seed: int) -> Batch:
    """Give texts of random tokens of several lengths, and labels as the class takes them."""
    random = torch.Generator().manual_seed(seed)
    text = model.config.get_text_config()
    ordinary = torch.tensor(sorted(set(range(5, min(text.vocab_size, 100))) - special_token_ids(model.config)))
    ids = torch.full((len(_TOKENS), max(_TOKENS)), text.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(_TOKENS):
        ids[row, :length] = ordinary[torch.randint(len(ordinary), (length,), generator=random)]
        mask[row, :length] = 1
        end = getattr(text, "eos_token_id", None)
        if isinstance(end, int) and end != text.pad_token_id:
            # Some classes take the state of this token for that of the text.
            ids[row, length - 1] = end
    batch = {"input_ids": ids, "attention_mask": mask}
    shape = (len(ids),) if head is Head.labels else ids.shape
    match head:
        case Head.none:
            return batch
        case Head.labels | Head.token_labels:
            labels = torch.randint(model.config.num_labels, shape, generator=random)
        case Head.masked:
            labels = ids.masked_fill(torch.rand(shape, generator=random) > 0.5, IGNORED)
            labels[:, 1] = ids[:, 1]
        case _:
            labels = ids.clone()
    return batch | {"labels": labels if head is Head.labels else labels.masked_fill(mask == 0, IGNORED)}


def own_loss(head: Head, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Give what the class itself says of a batch; without a head, a number that each state moves."""
    if head is Head.none:
        return loss_of_states(model(**batch)[0])
    return model_loss(model, batch)


def hfdist_loss(head: Head, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Give the loss of hfdist's objective, a mean over its items."""
    match head:
        case Head.masked:
            loss = MaskedTokens(TaskConfig(name=TaskName.mlm), 0, _tokenizer()).loss(model, batch)
        case Head.targets:
            loss = SequenceToSequence().loss(model, batch)
        case Head.labels | Head.token_labels:
            texts = {IDS: batch["input_ids"][None], MASK: batch["attention_mask"][None]}
            logits = Classification(_tokenizer(), LabelsConfig(names=["a", "b"])).read(model, texts)[0]
            return cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), ignore_index=IGNORED)
        case _:
            return own_loss(head, model, batch)
    return loss / (batch["labels"] != IGNORED).sum()


@functools.cache
def _tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = train_bpe(["a text"], 257)
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    return tokenizer


def short(reason: str) -> str:
    """Give a reason on one line of a table."""
    reason = " ".join(reason.split())
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[: _LONGEST_REASON - 3]}..."
