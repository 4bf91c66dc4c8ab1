"""Chooses whether attention of packed documents goes document by document: a small model shows if that is the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hfdist.config.data import Packing
from hfdist.config.model import Attention, Dtype
from hfdist.config.run import RunConfig
from hfdist.config.strategy import ContextMethod
from hfdist.config.task import Head
from hfdist.config.train import Compile, Precision
from hfdist.errors import ConfigError, first_line
from hfdist.models.architecture import count_heads
from hfdist.models.blocks import compiles_on_gpus
from hfdist.models.differences import largest_difference
from hfdist.models.document_attention import BY_DOCUMENTS, HAS_KERNEL, HEAD_MULTIPLE, LARGEST_HEAD
from hfdist.models.embeddings import token_reader
from hfdist.models.experts import first_number
from hfdist.models.probing import make_of_config
from hfdist.models.shrink import shrink_to_try

BOUND = 1e-5
"""Largest difference in float32, relative to the largest element; documents that see each other make 1e-2 and more."""
_LEAST_TOKENS = 256
"""Least tokens of a sequence on a CPU: in a shorter one, a call for each document costs more than the mask."""
_DOCUMENTS = ((40, 1, 23, 18), (7, 35, 40))
"""Tokens of the documents in each sequence of the trial: more and fewer than the window of a small model."""
_NOTED = "varlen_noted"
"""Name in transformers' registries of the trial's attention, whose calls are noted."""
_NOT_REPLACEABLE = "the model has no attention that transformers lets us replace"
_LEAVES_BLOCKS = "compiled blocks would be left for each document: only a GPU's kernel for 16 bits takes all at once"


def choose_attention(config: RunConfig, architecture: PreTrainedConfig, device_type: str) -> str | None:
    """Let attention of packed documents go document by document where the run has them and the model allows it.

    Args:
        config: config of the run, whose model is on this machine.
        architecture: the model's config, as `find_architecture` gives it; the attention is set in it.
        device_type: `cpu` or `cuda`: the devices of the run.

    Returns:
        Why attention does not go document by document; None: it does, or another attention was chosen.

    Raises:
        ConfigError: `model.attention=varlen` asks for it, and it cannot be.
    """
    asked = config.model.attention
    is_short = device_type == "cpu" and config.data.sequence_length < _LEAST_TOKENS
    gains = config.data.packing is not Packing.none and not is_short
    is_wanted = asked is Attention.varlen or (asked is Attention.auto and gains)
    if not is_wanted:
        return None
    name = None
    reason = _why_gathered(config, architecture)
    if reason is None:
        reason = _why_not_compiled(config, architecture, device_type)
    if reason is None:
        name, reason = find_by_documents(architecture, head=config.task.name.traits.head)
    if reason is None and name != BY_DOCUMENTS["sdpa"] and _is_compiled(config, device_type):
        reason = _LEAVES_BLOCKS
    if reason is None:
        architecture._attn_implementation = name
    elif asked is Attention.varlen:
        raise ConfigError(
            f"attention cannot go document by document here: {reason}",
            where="model.attention",
            found=f"varlen, of {architecture.model_type}, with train.compile={config.train.compile.value}",
            hint="train.compile=none, or model.attention=auto" if reason == _LEAVES_BLOCKS else "model.attention=auto",
        )
    return reason


def _why_gathered(config: RunConfig, architecture: PreTrainedConfig) -> str | None:
    """Say that the ranks which share a sequence need a mask; None: they do not, or ranks share no sequences."""
    strategy = config.strategy
    if strategy.context == 1:
        return None
    is_uneven = any(heads % (strategy.context * strategy.tensor) for _, heads in count_heads(architecture))
    is_gathered = strategy.context_method is ContextMethod.gather or is_uneven
    return "ranks that gather keys and values have some rows of the mask" if is_gathered else None


def _is_compiled(config: RunConfig, device_type: str) -> bool:
    """Whether blocks are compiled, as far as the config tells it."""
    if config.train.compile is not Compile.auto or device_type != "cuda":
        return config.train.compile is Compile.blocks
    return compiles_on_gpus(config.train, config.strategy)


def _why_not_compiled(config: RunConfig, architecture: PreTrainedConfig, device_type: str) -> str | None:
    """Say why compiled code cannot go document by document; None: it can, or nothing is compiled."""
    if config.train.compile is Compile.model:
        return "train.compile=model compiles masks, too"
    if not _is_compiled(config, device_type) or (device_type == "cuda" and _may_fit_kernel(config, architecture)):
        return None
    return _LEAVES_BLOCKS


def _may_fit_kernel(config: RunConfig, architecture: PreTrainedConfig) -> bool:
    """Whether torch's kernel for documents takes the states of the model, as far as the configs tell it."""
    text = architecture.get_text_config(decoder=True)
    width, heads = first_number(text, ("hidden_size",)), first_number(text, ("num_attention_heads",))
    head_size = first_number(text, ("head_dim",)) or width // max(heads, 1)
    fits = head_size > 0 and head_size % HEAD_MULTIPLE == 0 and head_size <= LARGEST_HEAD
    is_half = config.train.precision is not Precision.fp32 or config.model.dtype is Dtype.bfloat16
    has_dropout = bool(getattr(text, "attention_dropout", 0.0))
    return HAS_KERNEL and fits and is_half and not has_dropout


@unset_fake_temporarily()
def find_by_documents(architecture: PreTrainedConfig, *, head: Head = Head.tokens) -> tuple[str | None, str | None]:
    """Compare two runs of a small model, document by document and with a mask, on the CPU in float32.

    Returns:
        The attention's name in transformers' registries and None, or None and the reason why it cannot be taken.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            small = shrink_to_try(architecture)
            # None: transformers chooses an attention by itself.
            masked = _make(small, None, head)
            name = BY_DOCUMENTS.get(str(masked.config.get_text_config(decoder=True)._attn_implementation))
            if name is None:
                return None, _NOT_REPLACEABLE
            expected = _run(masked)
            with _seeing_calls(name) as calls:
                found = _run(_make(small, _NOTED, head))
        except Exception as error:  # whatever a model raises that cannot be made small, or does more with masks
            if isinstance(error, KeyError) and error.args == (_NOTED,):
                # The model looks an attention up in a table of its own, and not in transformers' registry.
                return None, _NOT_REPLACEABLE
            return None, f"a small model cannot be tried so: {first_line(error)}"
    if not any(calls):
        return None, "the model looks for no documents in positions" if calls else _NOT_REPLACEABLE
    difference = largest_difference(expected[0], found[0], expected[1:], found[1:])
    # A difference that is not a number is refused, too: it is not `<=`.
    if difference <= BOUND:
        return name, None
    return None, f"a small model differs by {difference:.0e}"


def _make(small: PreTrainedConfig, attention: str | None, head: Head) -> PreTrainedModel:
    """Make a small model with this attention; None: with the one that transformers chooses."""
    small = copy.deepcopy(small)
    small._attn_implementation = attention
    return make_of_config(small, head)


def _run(model: PreTrainedModel) -> list[torch.Tensor]:
    """Give the logits of packed documents, and the gradient of each parameter, empty where there is none."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in _DOCUMENTS])
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(min(vocab_size, 100), positions.shape, generator=generator)
    logits: torch.Tensor = token_reader(model)(input_ids=ids, position_ids=positions, use_cache=False)[0]
    (logits * torch.randn(logits.shape, generator=generator)).sum().backward()
    return [logits.detach(), *(torch.empty(0) if p.grad is None else p.grad for p in model.parameters())]


@contextmanager
def _seeing_calls(name: str) -> Iterator[list[bool]]:
    """Let the attention `_NOTED` compute what `name` computes.

    Yields:
        A list with an entry for each call of it: whether the call got borders of documents.
    """
    calls: list[bool] = []
    attend = ALL_ATTENTION_FUNCTIONS[name]

    def attend_and_note(
        module: torch.nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, **more: Any
    ) -> object:
        # A mask of tokens x tokens has four dimensions, borders have one or two.
        calls.append(torch.is_tensor(attention_mask) and attention_mask.ndim <= 2)
        return attend(module, query, key, value, attention_mask, **more)

    AttentionInterface.register(_NOTED, attend_and_note)
    AttentionMaskInterface.register(_NOTED, ALL_MASK_ATTENTION_FUNCTIONS[name])
    yield calls
