"""Which models read a text as encoders do, so that a token sees what comes after it: a small model is tried.

So no list of types is needed. Texts of such models cannot be packed: each is read in a row of its own, padded to the
longest one.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.config.task import Head
from hfdist.errors import ConfigError, first_line
from hfdist.models.heads import HEADS
from hfdist.models.position_limit import most_positions
from hfdist.models.positions import count_unused_positions
from hfdist.models.probing import make_of_config, small_model
from hfdist.models.shrink import shrink

BOUND = 1e-5
"""Largest difference of a text beside longer ones from itself alone, in float32, relative to the largest element."""
_LENGTHS = (11, 23, 4, 17)
"""Tokens of the texts that are tried: shorter and longer than the window of a small model."""
_FIRST_ID = 5
"""Lowest token id of the texts that are tried: those below it may be special tokens."""
_READ_AHEAD: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
"""Whether models without a head read ahead. A start asks more than once, and each trial makes a small model."""


@torch.no_grad()
def reads_ahead(model: PreTrainedModel) -> bool:
    """Whether the first token of a text sees the next one.

    Args:
        model: a small whole model on the CPU. Whatever it raises is not caught here.
    """
    reader = model.base_model
    ids = _text_ids(model, max(_LENGTHS))[None]
    changed = ids.clone()
    changed[:, 1] = _FIRST_ID
    before = reader(input_ids=ids)[0][:, 0]
    after = reader(input_ids=changed)[0][:, 0]
    return not torch.allclose(before, after, rtol=1e-5, atol=1e-6)


@unset_fake_temporarily()
def takes_texts_apart(model: PreTrainedModel, head: Head) -> bool:
    """Whether a model is given each text in a row of its own.

    Models with labels are, as their classes look for the ends of rows; so are models that write targets or find hidden
    tokens. A model without a head is, if it reads ahead: a small model of the same class is tried.

    Args:
        model: the run's model, of which the class and the config are read.
        head: what the model gives at its end.
    """
    if head is not Head.none:
        return head.is_padded
    if model not in _READ_AHEAD:
        with torch.random.fork_rng(devices=[]):
            try:
                _READ_AHEAD[model] = reads_ahead(small_model(model))
            except Exception:  # whatever a model raises that cannot be made small, or reads no text
                _READ_AHEAD[model] = False
    return _READ_AHEAD[model]


@unset_fake_temporarily()
def check_reads_no_further(architecture: PreTrainedConfig) -> None:
    """Check, by trying a small model, that a model of next tokens sees no token after its own: it would copy it.

    Raises:
        ConfigError: a token sees the next one, as in an encoder that is opened as a model of next tokens.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            sees_next = reads_ahead(_make_small(architecture, Head.tokens))
        except Exception:  # whatever a model raises that cannot be made small, or reads something else than text
            return
    if sees_next:
        reason = "a token of this model sees the next ones, which it should predict"
        allowed = "a model in which a token sees only those before it"
        decoder = "model.config.is_decoder=true, " if getattr(architecture, "is_decoder", None) is False else ""
        hint = f"{decoder}hfdist tune task=mlm, or another model.name"
        raise _refusal(architecture, Head.tokens, reason, allowed=allowed, hint=hint)


@unset_fake_temporarily()
def check_reads_texts(architecture: PreTrainedConfig, *, head: Head, longest: int) -> bool:
    """Try whether models of this architecture read texts in padded rows as they read each text alone.

    A model without a head is tried only if it reads ahead: for others texts are packed, not padded.

    Args:
        architecture: the model's config, as `find_architecture` gives it.
        head: what the model gives at its end.
        longest: tokens of the longest text.

    Returns:
        Whether the models are encoders.

    Raises:
        ConfigError: the models read no text, read it otherwise beside longer ones, save statistics of it, or have
            fewer positions than the longest text.
    """
    if head is Head.masked and architecture.is_encoder_decoder:
        reason = "this is an encoder-decoder, which hides tokens in another way"
        raise _refusal(architecture, head, reason, hint="task=span_corruption, or another model.name")
    with torch.random.fork_rng(devices=[]):
        try:
            model = _make_small(architecture, head)
            is_encoder = reads_ahead(model)
            if head is Head.none and not is_encoder:
                return False
            difference = _differ_by_padding(model)
            unused = count_unused_positions(model)
            has_statistics = _keeps_statistics(model)
        except Exception as error:  # whatever a model raises that reads something else than text
            if head is Head.none and architecture.model_type in HEADS[Head.tokens].by_type:
                # A model of next tokens: its texts may be packed.
                return False
            reason = f"a small model cannot read texts: {first_line(error)}"
            if architecture.is_encoder_decoder:
                reason = "this is an encoder-decoder, which reads a text only beside a target"
            raise _refusal(architecture, head, reason) from error
    # `not <=` is true of NaN, too.
    if not difference <= BOUND:
        reason = f"a text says something else beside longer ones: a small model differs by {difference:.0e}"
        raise _refusal(architecture, head, reason)
    if has_statistics:
        # With other ranks or micro batches a process reads other rows, and would save other statistics.
        raise _refusal(architecture, head, "in training this type saves statistics of what a process reads")
    limit = most_positions(architecture)
    if unused and limit is not None and longest > limit - unused:
        raise ConfigError(
            "texts are longer than the model has positions",
            where="data.sequence_length",
            found=longest,
            allowed=f"<= {limit - unused}: the first {unused} of {limit} positions are no token's",
            hint=f"data.sequence_length={limit - unused}",
        )
    return is_encoder


def check_pipeline(architecture: PreTrainedConfig, *, head: Head, pipeline: int) -> None:
    """Check that the texts of an encoder can go through a pipeline of so many ranks.

    Raises:
        ConfigError: the texts become embeddings. Each has a row, so micro batches have other numbers of rows.
    """
    if head is Head.none and pipeline > 1:
        raise ConfigError(
            "texts of an encoder have a row each, of another number in each micro batch, and a pipeline has equal ones",
            where="strategy.pipeline",
            found=f"{pipeline}, with {architecture.model_type} and task.name=embed",
            allowed="1 for embeddings of encoders",
            hint="strategy=fsdp2, zero3 or ddp",
        )


def _refusal(
    architecture: PreTrainedConfig,
    head: Head,
    reason: str,
    *,
    allowed: str | None = None,
    hint: str = "another model.name",
) -> ConfigError:
    """Make the error about a type that cannot be trained with this head."""
    classes = HEADS[head]
    if allowed is None:
        allowed = f"a type of {classes.auto.__name__} that reads token ids, such as bert, modernbert, qwen3"
    found = f"{architecture.model_type}, as a {classes.kind}"
    return ConfigError(reason, where="model.name, model.type", found=found, allowed=allowed, hint=hint)


def _make_small(architecture: PreTrainedConfig, head: Head) -> PreTrainedModel:
    """Make a small model of this architecture on the CPU, with a token for padding."""
    small = shrink(architecture)
    # The code of a type that transformers does not have is found by this name.
    small.name_or_path = architecture.name_or_path
    text = small.get_text_config()
    if text.pad_token_id is None:
        # Classes that look for the last token of a text need it.
        text.pad_token_id = 0
    return make_of_config(small, head)


@torch.no_grad()
def _differ_by_padding(model: PreTrainedModel) -> float:
    """Give the largest difference of outputs between a text alone and a text in a row that is filled up.

    It is relative to the largest element of all outputs.
    """
    padding = model.config.get_text_config().pad_token_id
    ids = torch.full((len(_LENGTHS), max(_LENGTHS)), padding)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(_LENGTHS):
        ids[row, :length], mask[row, :length] = _text_ids(model, length), 1
    together: torch.Tensor = model(input_ids=ids, attention_mask=mask)[0]
    differences, largest = [], 0.0
    for row, length in enumerate(_LENGTHS):
        alone: torch.Tensor = model(input_ids=ids[row : row + 1, :length])[0][0]
        # The model gives one number for each label of the text, or the states of each token.
        is_of_text = alone.ndim == 1 and alone.shape == together.shape[1:]
        beside = together[row] if is_of_text else together[row, :length]
        differences.append(float((alone - beside).abs().max()))
        largest = max(largest, float(alone.abs().max()))
    # Python's own `max` would pass over a NaN.
    return float(torch.tensor(differences).max()) / max(largest, torch.finfo(torch.float32).tiny)


@torch.no_grad()
def _keeps_statistics(model: PreTrainedModel) -> bool:
    """Whether a forward in training changes tensors that are saved, such as the statistics of batch norms."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    model(input_ids=_text_ids(model, max(_LENGTHS))[None])
    model.eval()
    return any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def _text_ids(model: PreTrainedModel, length: int) -> torch.Tensor:
    """Make the token ids of a text, [length]; it ends as the model's texts do."""
    text_config = model.config.get_text_config()
    lowest = _FIRST_ID + 1
    num_ids = min(text_config.vocab_size, 100) - lowest
    # Steps of 7, so that neighbours differ by more than 1.
    ids = lowest + (torch.arange(length) * 7) % num_ids
    # Configs of some types have no such field.
    end = getattr(text_config, "eos_token_id", None)
    if isinstance(end, int) and end != text_config.pad_token_id:
        # A class may take the state of the end token as that of the whole text.
        ids[-1] = end
    return ids
