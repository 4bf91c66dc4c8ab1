"""What computes attention of packed documents: document by document, where a small model shows that it is the same."""

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
"""On a CPU, calls for the documents of a shorter sequence cost more than its mask."""
_DOCUMENTS = ((40, 1, 23, 18), (7, 35, 40))
"""Lengths in each sequence: longer and shorter than the window of a small model."""
_NOTED = "varlen_noted"
"""Name in transformers' registries of an attention whose calls are noted."""
_NOT_REPLACEABLE = "the model has no attention that transformers lets us replace"
_LEAVES_BLOCKS = "compiled blocks would be left for each document: only a GPU's kernel for 16 bits takes all at once"


def choose_attention(config: RunConfig, architecture: PreTrainedConfig, device_type: str) -> str | None:
    """Let packed documents be computed one by one, if the run has them and may; set in `architecture`.

    Args:
        config: of the run; its model is on this machine.
        architecture: from `find_architecture`.
        device_type: `cpu` or `cuda`: where the run is to be.

    Returns:
        Why packed documents are not computed one by one; None: they are, or another attention was chosen.

    Raises:
        ConfigError: `model.attention=varlen` cannot be.
    """
    asked = config.model.attention
    is_short = device_type == "cpu" and config.data.sequence_length < _LEAST_TOKENS
    gains = config.data.packing is not Packing.none and not is_short
    if asked is not Attention.varlen and (asked is not Attention.auto or not gains):
        return None
    name = None
    reason = _why_gathered(config, architecture) or _why_not_compiled(config, architecture, device_type)
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
    """Say that ranks which share sequences need a mask; None: they do not, or do not share any."""
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
    """Say why what is compiled cannot go document by document; None: it can, or nothing is compiled."""
    if config.train.compile is Compile.model:
        return "train.compile=model compiles masks, too"
    is_half = config.train.precision is not Precision.fp32 or config.model.dtype is Dtype.bfloat16
    text = architecture.get_text_config(decoder=True)
    width, heads = first_number(text, ("hidden_size",)), first_number(text, ("num_attention_heads",))
    size = first_number(text, ("head_dim",)) or width // max(heads, 1)
    fits = size > 0 and size % HEAD_MULTIPLE == 0 and size <= LARGEST_HEAD
    has_dropout = bool(getattr(text, "attention_dropout", 0.0))
    takes_all = device_type == "cuda" and is_half and HAS_KERNEL and fits and not has_dropout
    return _LEAVES_BLOCKS if _is_compiled(config, device_type) and not takes_all else None


@unset_fake_temporarily()
def find_by_documents(architecture: PreTrainedConfig, *, head: Head = Head.tokens) -> tuple[str | None, str | None]:
    """Compare a small model that goes document by document with itself with a mask, on the CPU in float32.

    Returns:
        The name in transformers' registries, or why not.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            small = shrink_to_try(architecture)
            # transformers chooses its attention here.
            masked = _make(small, None, head)
            name = BY_DOCUMENTS.get(str(masked.config.get_text_config(decoder=True)._attn_implementation))
            if name is None:
                return None, _NOT_REPLACEABLE
            expected = _run(masked)
            with _seeing_calls(name) as calls:
                found = _run(_make(small, _NOTED, head))
        except Exception as error:  # whatever a model raises that cannot be made small, or does more with masks
            if isinstance(error, KeyError) and error.args == (_NOTED,):
                return None, _NOT_REPLACEABLE
            return None, f"a small model cannot be tried so: {first_line(error)}"
    if not any(calls):
        return None, "the model looks for no documents in positions" if calls else _NOT_REPLACEABLE
    difference = largest_difference(expected[0], found[0], expected[1:], found[1:])
    # A difference of NaN is none that is small.
    return (name, None) if difference <= BOUND else (None, f"a small model differs by {difference:.0e}")


def _make(small: PreTrainedConfig, attention: str | None, head: Head) -> PreTrainedModel:
    small = copy.deepcopy(small)
    small._attn_implementation = attention
    return make_of_config(small, head)


def _run(model: PreTrainedModel) -> list[torch.Tensor]:
    """Logits of packed documents, and the gradient of each parameter, empty where there is none."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in _DOCUMENTS])
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(min(vocab_size, 100), positions.shape, generator=generator)
    logits: torch.Tensor = token_reader(model)(input_ids=ids, position_ids=positions, use_cache=False)[0]
    (logits * torch.randn(logits.shape, generator=generator)).sum().backward()
    return [logits.detach(), *(torch.empty(0) if p.grad is None else p.grad for p in model.parameters())]


@contextmanager
def _seeing_calls(name: str) -> Iterator[list[bool]]:
    """Let `_NOTED` do what `name` does, and note of each call whether it got borders of documents."""
    calls: list[bool] = []
    attend = ALL_ATTENTION_FUNCTIONS[name]

    def seen(
        module: torch.nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, **more: Any
    ) -> object:
        calls.append(torch.is_tensor(attention_mask) and attention_mask.ndim <= 2)
        return attend(module, query, key, value, attention_mask, **more)

    AttentionInterface.register(_NOTED, seen)
    AttentionMaskInterface.register(_NOTED, ALL_MASK_ATTENTION_FUNCTIONS[name])
    yield calls
