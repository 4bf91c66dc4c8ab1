"""`model.*` and `adapter.*`: which model, from where, in which form, and with which adapter."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hfdist.config.ranges import limited

ALL_LINEAR = "all-linear"
"""A target: every linear layer but the head."""


class Init(Enum):
    """Where the weights come from."""

    random = "random"
    pretrained = "pretrained"


class Dtype(Enum):
    """Type in which the parameters are held; `auto` is float32, since the optimizer must have float32 weights."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Attention(Enum):
    """Attention implementation of transformers; `auto` lets transformers choose."""

    auto = "auto"
    eager = "eager"
    sdpa = "sdpa"
    flash_attention_2 = "flash_attention_2"
    flex_attention = "flex_attention"


class Loss(Enum):
    """What computes the training loss from the last hidden states. All give the same, but for rounding."""

    auto = "auto"
    full = "full"
    chunked = "chunked"


@dataclass(kw_only=True)
class TokenizerConfig:
    """A tokenizer from the Hub or a folder, or one trained on the corpus at first use."""

    name: str | None = None
    revision: str | None = None
    vocab_size: int = limited(8192, at_least=257)
    train_bytes: int = limited(16_000_000, at_least=10_000)


@dataclass(kw_only=True)
class ModelConfig:
    """`model.*`: a causal language model of transformers: which, from where, in which form."""

    name: str | None = None
    revision: str | None = None
    gguf_file: str | None = None
    type: str | None = None
    init: Init = Init.random
    allow_missing: bool = False
    dtype: Dtype = Dtype.auto
    attention: Attention = Attention.auto
    loss: Loss = Loss.auto
    """`full`: the model by itself, from all logits in float32. `chunked`: some rows at a time, and never all logits.
    `auto`: `chunked`, or `full` where the model needs its logits whole."""
    config: dict[str, Any] = field(default_factory=dict)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    trust_remote_code: bool = False


class Quantization(Enum):
    """Data types of 4 bits, as bitsandbytes names them."""

    nf4 = "nf4"
    fp4 = "fp4"


@dataclass(kw_only=True)
class AdapterConfig:
    """`adapter.*`: a few weights of PEFT's in a model's layers, trained in place of the model's own."""

    type: str | None = None
    path: str | None = None
    rank: int | None = limited(None, at_least=1)
    alpha: int | None = limited(None, at_least=1)
    dropout: float = limited(0.0, at_least=0, at_most=1)
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    target_pattern: str | None = None
    modules_to_save: list[str] = field(default_factory=list)
    rslora: bool = False
    dora: bool = False
    quantization: Quantization | None = None
    merge: bool = True
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def is_used(self) -> bool:
        """Whether there is an adapter at all."""
        return self.type is not None or self.path is not None
