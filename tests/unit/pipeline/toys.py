"""Small causal language models with one odd habit each, that a split must keep, or refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from hfdist.models.blocks import find_block_parts
from hfdist.models.initialize import initialize_by_name
from hfdist.pipeline.cut import Cut, cut_model
from hfdist.pipeline.parcel import Carry, Header, Parcel, unpack


class ToyConfig(PreTrainedConfig):
    model_type = "toy"

    def __init__(self, hidden_size=8, vocab_size=32, num_hidden_layers=4, **kwargs):
        self.hidden_size, self.vocab_size, self.num_hidden_layers = hidden_size, vocab_size, num_hidden_layers
        super().__init__(**kwargs)


class Block(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.index = index
        self.scale = 1.0 + index
        self.linear = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden, scale=1.0):
        return hidden + scale * torch.tanh(self.linear(hidden))


class Toy(PreTrainedModel):
    """Embeds, mixes neighbours, runs the blocks, and gives the loss of the next token."""

    config_class = ToyConfig
    block_class = Block
    _tied_weights_keys = {"head.weight": "embedding.weight"}  # noqa: RUF012  # as transformers' models have it

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(self.block_class(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, labels=None, num_items_in_batch=None, **kwargs):
        embedded = self.embedding(input_ids)
        hidden = self.run_blocks(embedded + embedded.roll(1, dims=1), input_ids)
        logits = self.head(self.norm(hidden))
        loss = None if labels is None else self.loss(logits, labels, num_items_in_batch)
        return self.answer(loss, logits)

    def loss(self, logits, labels, num_items):
        reduction = "mean" if num_items is None else "sum"
        targets = labels[:, 1:].flatten()
        total = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction=reduction)
        return total if num_items is None else total / num_items

    def answer(self, loss, logits):
        return CausalLMOutput(loss=loss, logits=logits)

    def run_blocks(self, hidden, input_ids):
        for block in self.blocks:
            hidden = block(hidden, scale=block.scale)
        return hidden


# ---- hidden states are enough ----


class Tuples(Toy):
    """The blocks return a tuple of which only the first is read, as before transformers 5; so does the model."""

    class block_class(Block):
        def forward(self, hidden, scale=1.0):
            return super().forward(hidden, scale), None

    def run_blocks(self, hidden, input_ids):
        for block in self.blocks:
            hidden = block(hidden, scale=block.scale)[0]
        return hidden


class Dicts(Toy):
    """The model returns a plain dict."""

    def answer(self, loss, logits):
        return {"loss": loss, "logits": logits}


class Skips(Toy):
    """Leaves out some blocks, as layer drop does."""

    skipped: tuple[int, ...] = (1, 3)

    def run_blocks(self, hidden, input_ids):
        for index, block in enumerate(self.blocks):
            if index not in self.skipped:
                hidden = block(hidden)
        return hidden


class Remembers(Toy):
    """Blocks write into a dict and a list of the caller; later blocks read what they find there."""

    class block_class(Block):
        def forward(self, hidden, shared, history):
            hidden = hidden + torch.tanh(self.linear(hidden)) + sum(shared.values())
            if self.index < 2:
                shared[f"of {self.index}"] = 0.5 * hidden
            history.append(hidden)
            return hidden + history[0]

    def run_blocks(self, hidden, input_ids):
        shared, history = {}, []
        for block in self.blocks:
            hidden = block(hidden, shared, history=history)
        return hidden


class WritesInPlace(Toy):
    """Changes what a block returned in place."""

    def run_blocks(self, hidden, input_ids):
        for block in self.blocks:
            hidden = block(hidden)
            hidden += 0.5
        return hidden


class TwoLists(Toy):
    """A block is two modules, kept in two lists side by side."""

    def __init__(self, config):
        super().__init__(config)
        self.gates = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in self.blocks)

    def run_blocks(self, hidden, input_ids):
        for block, gate in zip(self.blocks, self.gates, strict=True):
            hidden = gate(hidden + block(hidden))
        return hidden


class LearnsBetween(Toy):
    """The same layer outside of the blocks follows each of them."""

    def __init__(self, config):
        super().__init__(config)
        self.between = nn.Linear(config.hidden_size, config.hidden_size)

    def run_blocks(self, hidden, input_ids):
        for block in self.blocks:
            hidden = self.between(block(hidden))
        return hidden


# ---- more must travel ----


class SecondOutput(Toy):
    """The last block's second output reaches the logits."""

    class block_class(Block):
        def forward(self, hidden, scale=1.0):
            return super().forward(hidden, scale), hidden.square()

    def run_blocks(self, hidden, input_ids):
        second = 0.0
        for block in self.blocks:
            hidden, second = block(hidden + second)
        return hidden + second


class UNet(Toy):
    """The first block's output is used again after the last."""

    def run_blocks(self, hidden, input_ids):
        first = hidden = self.blocks[0](hidden)
        for block in self.blocks[1:]:
            hidden = block(hidden)
        return hidden + first


class EmbedsAgain(Toy):
    """The embedding is looked up again at the end."""

    def run_blocks(self, hidden, input_ids):
        return super().run_blocks(hidden, input_ids) + self.embedding(input_ids)


class KeepsInput(Toy):
    """What went into the first block is added to what comes out of the last."""

    def __init__(self, config):
        super().__init__(config)
        self.positions = nn.Embedding(64, config.hidden_size)

    def run_blocks(self, hidden, input_ids):
        hidden = hidden + self.positions(torch.arange(input_ids.shape[1], device=hidden.device))
        return super().run_blocks(hidden, input_ids) + 0.1 * hidden


# ---- cannot be split ----


class Twice(Toy):
    """Each block runs twice."""

    def run_blocks(self, hidden, input_ids):
        for block in self.blocks:
            hidden = block(block(hidden))
        return hidden


class Backwards(Toy):
    """The blocks run from the last to the first."""

    def run_blocks(self, hidden, input_ids):
        for block in reversed(self.blocks):
            hidden = block(hidden)
        return hidden


class Reversible(Toy):
    """The blocks run without an autograd graph, which a reversible model makes again in its own backward."""

    def run_blocks(self, hidden, input_ids):
        with torch.no_grad():
            return super().run_blocks(hidden, input_ids)


class Detaches(Toy):
    """No gradient flows from a block to the one before it."""

    def run_blocks(self, hidden, input_ids):
        for block in self.blocks:
            hidden = block(hidden.detach())
        return hidden


class Stops(Toy):
    """Ends after two blocks, as an early exit does."""

    def run_blocks(self, hidden, input_ids):
        for block in self.blocks[:2]:
            hidden = block(hidden)
        return hidden


class SideChannel(Toy):
    """A block leaves a tensor on itself, and the model's end reads it there."""

    class block_class(Block):
        seen = None

        def forward(self, hidden, scale=1.0):
            self.seen = super().forward(hidden, scale)
            return self.seen

    def run_blocks(self, hidden, input_ids):
        return super().run_blocks(hidden, input_ids) + self.blocks[0].seen


def make_toy(kind: type[Toy] = Toy, **config: object) -> Toy:
    """Give a toy in train mode whose weights depend on their names alone."""
    model = kind(ToyConfig(**{"tie_word_embeddings": False} | config))
    initialize_by_name(model, seed=0)
    with torch.no_grad():
        # Larger than usual, so that what is missing shows in the loss.
        for parameter in {id(p): p for p in model.parameters()}.values():
            parameter.mul_(20)
    return model.train()


def toy_batch(sequences: int = 2, tokens: int = 6, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Give random tokens that are their own labels."""
    ids = torch.randint(32, (sequences, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


class Loopback:
    """A link between stages of one process: what is sent is described, detached and put together again."""

    def __init__(self):
        self._parcels: dict[int, Parcel | None] = {}

    def send(self, stage, parcel):
        self._parcels[stage] = None if parcel is None else travel(parcel)

    def receive(self, stage):
        return self._parcels.pop(stage)

    def flush(self):
        pass


def travel(parcel: Parcel) -> Parcel:
    """Give what the next stage receives: leaves, with the description that went through JSON."""
    header, tensors = unpack(parcel)
    copies = tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors)
    return Header.from_json(header.to_json()).pack(copies)


def cut_toys(make: Callable[[], PreTrainedModel], stages: tuple[range, ...], carry: Carry) -> list[Cut]:
    """Give one cut model for each stage, as on one rank each, that holds what `carry` asks."""
    cuts = []
    for stage in range(len(stages)):
        whole, model = make(), make()
        cut = cut_model(model, find_block_parts(model), stages, [stage])
        if carry.embedding and cut.embedding in cut.removed:
            cut.restore(cut.embedding, whole.get_parameter(cut.embedding).detach())
        cuts.append(cut)
    return cuts


def staged_step(cuts: list[Cut], carry: Carry, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run one forward and backward through all stages; give the loss, and the gradients summed by name."""
    sent: list[tuple[torch.Tensor, ...]] = []
    received: list[tuple[torch.Tensor, ...]] = []
    incoming = None
    for stage, cut in enumerate(cuts):
        value = cut.view(stage, carry).run(lambda model: model(**batch)["loss"], incoming)
        if stage < len(cuts) - 1:
            incoming = travel(value)
            sent.append(unpack(value)[1])
            received.append(unpack(incoming)[1])
    value.backward()
    for outputs, arrived in zip(reversed(sent), reversed(received), strict=True):
        pairs = [(o, a.grad) for o, a in zip(outputs, arrived, strict=True) if a.grad is not None]
        torch.autograd.backward([o for o, _ in pairs], [grad for _, grad in pairs])
    gradients: dict[str, torch.Tensor] = {}
    for cut in cuts:
        for name, parameter in cut.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
    return value.detach(), gradients


def whole_step(model: PreTrainedModel, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same in one piece."""
    loss = model(**batch)["loss"]
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
