"""Small causal language models with one odd habit each, that a split must keep, or refuse."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from hfdist.models.initialize import initialize_by_name
from hfdist.pipeline.stage_io import Carry, Outputs


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


class ReturnsTuple(Toy):
    """The model returns a tuple, as transformers' do with `return_dict=False`."""

    def answer(self, loss, logits):
        return logits if loss is None else (loss, logits)


class Unnamed(Toy):
    """transformers does not know which modules look tokens up and give logits."""

    get_input_embeddings = PreTrainedModel.get_input_embeddings
    get_output_embeddings = PreTrainedModel.get_output_embeddings


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


HIDDEN = Carry(Outputs.hidden, embedding=False)
LAST = Carry(Outputs.last, embedding=False)
HISTORY = Carry(Outputs.history, embedding=False)
EMBEDDING = Carry(Outputs.hidden, embedding=True)

NEEDED = {
    Toy: HIDDEN,
    Tuples: HIDDEN,
    Dicts: HIDDEN,
    ReturnsTuple: HIDDEN,
    Unnamed: HIDDEN,
    Skips: HIDDEN,
    Remembers: HIDDEN,
    WritesInPlace: HIDDEN,
    TwoLists: HIDDEN,
    LearnsBetween: HIDDEN,
    SecondOutput: LAST,
    UNet: HISTORY,
    EmbedsAgain: EMBEDDING,
    KeepsInput: EMBEDDING,
}
"""What must travel between the stages of each kind that can be split."""

REFUSED = (Twice, Backwards, Reversible, Detaches, Stops, SideChannel)

HALVES = (range(2), range(2, 4))
THIRDS = (range(1), range(1, 3), range(3, 4))
QUARTERS = tuple(range(block, block + 1) for block in range(4))


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
