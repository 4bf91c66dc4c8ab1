"""What each axis of the mesh should send in a step, and what a rank should hold: formulas from the sizes of a model.

A ring of n ranks sends 2 (n-1)/n of a tensor for an all-reduce, and (n-1)/n of the whole for a gather, a reduce-scatter
and an all-to-all. All is float32, and figures are averages over the ranks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from hfdist.sent_bytes import ring_bytes

_ITEM_BYTES = 4
_REPLICATE, _SHARD = "replicate", "sharded"


@dataclass(frozen=True, kw_only=True)
class Model:
    """Numbers of elements in a Llama, or a Mixtral, whose embedding and head are not tied."""

    hidden: int
    queries: int
    """Width of all heads together."""
    keys: int
    """Width of all heads of keys together; values have the same."""
    intermediate: int
    num_blocks: int
    vocabulary: int
    num_experts: int = 0
    num_chosen: int = 0
    """Experts of a token."""

    @classmethod
    def of(cls, sizes: dict[str, Any]) -> Model:
        """Read the fields of a config."""
        head = sizes["hidden_size"] // sizes["num_attention_heads"]
        return cls(
            hidden=sizes["hidden_size"],
            queries=head * sizes["num_attention_heads"],
            keys=head * sizes["num_key_value_heads"],
            intermediate=sizes["intermediate_size"],
            num_blocks=sizes["num_hidden_layers"],
            vocabulary=sizes["vocab_size"],
            num_experts=sizes.get("num_local_experts", 0),
            num_chosen=sizes.get("num_experts_per_tok", 0),
        )

    @property
    def attention(self) -> int:
        """Queries, keys, values and outputs of all blocks."""
        return self.num_blocks * self.hidden * (2 * self.queries + 2 * self.keys)

    @property
    def feed_forward(self) -> int:
        """Gate, up and down of all blocks, in all experts."""
        return self.num_blocks * 3 * self.hidden * self.intermediate * max(1, self.num_experts)

    @property
    def routers(self) -> int:
        """Elements of the routers of all blocks."""
        return self.num_blocks * self.num_experts * self.hidden

    @property
    def norms(self) -> int:
        """Two in each block, and the last."""
        return (2 * self.num_blocks + 1) * self.hidden

    @property
    def embeddings(self) -> int:
        """Embedding and head."""
        return 2 * self.vocabulary * self.hidden

    @property
    def blocks(self) -> int:
        """All in the blocks."""
        return self.attention + self.feed_forward + self.routers + self.norms - self.hidden

    @property
    def parameters(self) -> int:
        """All."""
        return self.blocks + self.embeddings + self.hidden


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of the axes, and how a step's tokens are divided."""

    micro_batches: int
    """Micro batches of a data rank in a step."""
    sequences: int
    """Sequences of a micro batch."""
    tokens: int
    """Tokens of a sequence."""
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    is_fsdp: bool = False
    reshards: bool = True
    """Whether FSDP2 gathers a block again for the backward."""
    gathers_keys: bool = False
    """Whether context ranks gather keys and values, in place of exchanging heads."""
    gathers_outputs: bool = False
    """Whether tensor ranks gather the output of each layer."""
    shares_tokens: bool = False
    """Whether tensor ranks share the tokens between attention and MLP."""


def sent_bytes(model: Model, layout: Layout) -> Counter[tuple[str, str]]:
    """Give the bytes that a rank sends in a step, by axis and kind of collective."""
    sent: Counter[tuple[str, str]] = Counter()

    def add(axis: str, degree: int, kind: str, num_elements: float) -> None:
        if degree > 1:
            sent[axis, kind] += ring_bytes(kind, num_elements * _ITEM_BYTES, degree)

    _add_tensor(add, model, layout)
    _add_context(add, model, layout)
    # Each chosen expert gets the token and sends it back; of both there is a gradient.
    routed = 4 * _tokens_of_step(layout) * model.num_chosen * model.hidden * model.num_blocks
    add("expert", layout.expert, "all-to-all", routed)
    # All stages but one send what they have computed, and all but one its gradient.
    crossing = 2 * (layout.pipeline - 1) / layout.pipeline * _tokens_of_step(layout) * model.hidden / layout.context
    add("pipeline", layout.pipeline, "send", crossing)
    _add_state(add, model, layout)
    return sent


def _tokens_of_step(layout: Layout) -> int:
    return layout.micro_batches * layout.sequences * layout.tokens


def _add_tensor(add: Any, model: Model, layout: Layout) -> None:
    # Tensor ranks talk in the stage that has the layer.
    of_rank = 1 / layout.pipeline
    states = _tokens_of_step(layout) * model.hidden * of_rank
    # The last token of a sequence has no target.
    targets = layout.micro_batches * layout.sequences * (layout.tokens - 1) * of_rank
    # What the embedding looks up. Of the loss: the gradient by the last states, and of each row the largest logit, the
    # sum of exponentials, the logit of the target and the sum of all logits.
    summed = states + targets * (model.hidden + 4)
    if layout.gathers_outputs:
        widths = [model.queries, model.keys, model.keys, model.hidden, 2 * model.intermediate, model.hidden]
        # Ranks send equally much, where one has a column less, too.
        padded = sum(layout.tensor * -(-width // layout.tensor) for width in widths)
        add("tensor", layout.tensor, "all-gather", states / model.hidden * model.num_blocks * padded)
        # The gradients by what layers read: queries, keys and values read the same, and so do gate and up.
        read = 2 * model.hidden + model.queries + model.intermediate
        summed += states / model.hidden * model.num_blocks * read
    elif layout.shares_tokens:
        # Attention and the feed-forward layers gather what they read, again in the backward, and the gradient of what
        # they give, which a reduce-scatter adds up, as it does the gradient of what they read. At the ends: the last
        # states, and the gradient of the first ones.
        add("tensor", layout.tensor, "all-gather", states * (model.num_blocks * 6 + 2))
        add("tensor", layout.tensor, "reduce-scatter", states * model.num_blocks * 4)
    else:
        # After attention and after the feed-forward layers, and the gradients before them.
        summed += states * model.num_blocks * 4
    # Whole on each rank are norms alone, or FSDP2's shards of them.
    summed += model.norms * of_rank / (layout.shard * layout.context if layout.is_fsdp else 1)
    add("tensor", layout.tensor, "all-reduce", summed)


def _add_context(add: Any, model: Model, layout: Layout) -> None:
    own_tokens = _tokens_of_step(layout) / layout.context / layout.tensor / layout.pipeline
    if layout.gathers_keys:
        keys = 2 * own_tokens * layout.context * model.keys * model.num_blocks
        add("context", layout.context, "all-gather", keys)
        add("context", layout.context, "reduce-scatter", keys)
    else:
        # Of this rank's tokens queries, keys, values and outputs, forward and backward.
        states = 2 * own_tokens * 2 * (model.queries + model.keys) * model.num_blocks
        add("context", layout.context, "all-to-all", states)


def _add_state(add: Any, model: Model, layout: Layout) -> None:
    weights = _held(model, layout)
    shards = layout.shard * layout.context
    if layout.is_fsdp:
        # A pipeline keeps what it has gathered to the end of the step.
        again = model.blocks if layout.reshards and layout.pipeline == 1 else 0
        add(_SHARD, shards, "all-gather", weights + again)
        # On a CPU gradients are reduced to shards by an exchange, which sends what a reduce-scatter does.
        add(_SHARD, shards, "all-to-all", weights)
        add(_REPLICATE, layout.replicate, "all-reduce", weights / shards)
    else:
        # In these layouts the ranks of one axis have other tokens, and its name.
        axis = "context" if layout.context > 1 else "expert" if layout.expert > 1 else "tokens"
        of_experts = model.feed_forward / layout.expert if layout.expert > 1 else 0
        add(axis, layout.replicate * shards, "all-reduce", weights - of_experts)


def _held(model: Model, layout: Layout) -> float:
    """Elements of a rank's stages, before FSDP2 shards them."""
    of_experts = model.feed_forward / layout.expert
    divided = model.attention + model.embeddings + (of_experts if layout.expert == 1 else 0)
    whole = model.norms + model.routers + (of_experts if layout.expert > 1 else 0)
    return (divided / layout.tensor + whole) / layout.pipeline


def held_bytes(model: Model, layout: Layout) -> dict[str, float]:
    """Give the bytes of weights, gradients and Adam's two moments that a rank holds at the end of a step."""
    shards = layout.shard * layout.context if layout.is_fsdp else 1
    own = _held(model, layout) * _ITEM_BYTES / shards
    return {"weights": own, "gradients": own, "optimizer": 2 * own}
