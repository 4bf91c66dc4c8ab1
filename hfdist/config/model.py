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
    """An implementation of transformers, or `varlen`: packed documents one by one, without a mask.

    `auto` is `varlen` for packed documents where a small model shows that it is the same, else transformers' choice.
    """

    auto = "auto"
    eager = "eager"
    sdpa = "sdpa"
    varlen = "varlen"
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
    """Hub id or folder; null: train a byte-level BPE on the data once, and cache it."""
    revision: str | None = None
    """Branch, tag or commit of the tokenizer's repository."""
    vocab_size: int = limited(8192, at_least=257)
    """Vocabulary of a trained tokenizer."""
    train_bytes: int = limited(16_000_000, at_least=10_000)
    """Text that a trained tokenizer sees, in bytes."""


@dataclass(kw_only=True)
class ModelConfig:
    """`model.*`: a causal language model of transformers: which, from where, in which form."""

    name: str | None = None
    """Hub id, folder or .gguf file; null: the architecture is `type` with the fields of `config`."""
    revision: str | None = None
    """Branch, tag or commit of the Hub repository."""
    gguf_file: str | None = None
    """NAME.gguf in the repository or folder: weights, config and tokenizer come from it."""
    type: str | None = None
    """Architecture by the model_type of transformers; only where name is null."""
    init: Init = Init.random
    """Where the weights come from: random | pretrained."""
    allow_missing: bool = False
    """Whether weights that no file holds are drawn, by name and train.seed, and unknown ones left out."""
    dtype: Dtype = Dtype.auto
    """Type of the weights: auto (float32) | float32 | bfloat16."""
    attention: Attention = Attention.auto
    """Implementation of attention: auto | eager | sdpa | varlen | flash_attention_2 | flex_attention.

    `auto`: `varlen` (packed documents one by one) where a small model gives the same, else transformers' choice.
    """
    loss: Loss = Loss.auto
    """What computes the training loss: auto | full (from all logits) | chunked.

    `full`: the model by itself, from all logits in float32. `chunked`: some rows at a time, and never all logits.
    `auto`: `chunked`, or `full` where the model needs its logits whole, or where few of them cost less so.
    """
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the Hugging Face config, checked against its class."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    trust_remote_code: bool = False
    """Whether Python code of the repository runs; only your command line can say true."""


class Quantization(Enum):
    """Data types of 4 bits, as bitsandbytes names them."""

    nf4 = "nf4"
    fp4 = "fp4"


class AdapterPart(Enum):
    """Parts of a model's blocks, by the matrices that an adapter can stand beside."""

    attention = "attention"
    """What mixes tokens: attention, or in its place recurrent layers and convolutions."""
    mlp = "mlp"
    """Feed-forward layers that every token meets, shared experts too."""
    experts = "experts"
    """Feed-forward layers of which a router chooses some for each token."""
    routers = "routers"


@dataclass(kw_only=True)
class AdapterConfig:
    """`adapter.*`: a few weights of PEFT's in a model's layers, trained in place of the model's own."""

    type: str | None = None
    """PEFT's name of a method (lora, loha, lokr, ia3, ...); null: the model itself is trained."""
    path: str | None = None
    """Saved adapter to go on from, a folder or a Hub id; it says type, rank and targets itself."""
    rank: int | None = limited(None, at_least=1)
    """Width of the adapter's matrices; null: PEFT's default for the type."""
    alpha: int | None = limited(None, at_least=1)
    """Scale: the adapter's output times alpha / rank; null: PEFT's default."""
    dropout: float = limited(0.0, at_least=0, at_most=1)
    """Dropout on the adapter's input."""
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Layers with an adapter: all-linear (all but the head), names, or their last parts: [q_proj,v_proj]."""
    target_pattern: str | None = None
    """In place of targets: a regular expression for whole names."""
    target_parts: list[AdapterPart] | None = None
    """In place of targets: all matrices of these parts of the blocks: attention | mlp | experts | routers."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained whole besides and kept with the adapter: [lm_head]."""
    rslora: bool = False
    """lora: whether the scale is alpha / sqrt(rank)."""
    dora: bool = False
    """lora: whether directions and lengths of weights are learned apart."""
    quantization: Quantization | None = None
    """lora: type of 4 bits of frozen linear layers and experts, by bitsandbytes: nf4 | fp4; null: not quantized."""
    merge: bool = True
    """Whether the end also writes model/, with the adapter merged into it, as a whole Hub model."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further fields of PEFT's config class of the type, checked against it."""

    @property
    def is_used(self) -> bool:
        """Whether there is an adapter at all."""
        return self.type is not None or self.path is not None
