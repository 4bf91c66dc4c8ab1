"""Between attention and MLP each tensor rank has a part of the tokens (sequence parallelism of tensor ranks).

    first block's input     whole on each rank -> its tokens
    attention, MLP          its tokens -> all of them, gathered; of the sum of what the ranks compute, its tokens
    last block's output     its tokens -> whole on each rank

So norms and sums of residuals are computed once, and what a block keeps for its backward is divided. What was a sum
over the ranks is one in two halves, a reduce-scatter and a gather: in a ring they send as much. Korthikanti et al.,
2022, "Reducing Activation Recomputation in Large Transformer Models".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from hfdist.collectives import all_gather_single, reduce_scatter_single
from hfdist.errors import ConfigError
from hfdist.models.blocks import find_blocks

SEQUENCE = "strategy.sequence"

Exchange = Callable[[torch.Tensor, int, dist.ProcessGroup], torch.Tensor]
"""(part or whole, tokens of a sequence, ranks) -> whole or part; [sequences, tokens, hidden size]."""


def find_readers(model: PreTrainedModel, layers: dict[str, str], rules: dict[str, str]) -> list[str]:
    """Give the names of the modules that need all tokens: each has layers `colwise`, and at its end one `rowwise`.

    Args:
        model: whole.
        layers: names and styles of its divided layers.
        rules: names and styles of what is divided otherwise.

    Raises:
        ConfigError: not all that is divided is such a layer of such a module, or there is an adapter.
    """
    if adapters := getattr(model, "peft_config", {}):
        what = "tensor ranks share no tokens beside an adapter in this version"
        raise ConfigError(what, where=SEQUENCE, found=f"adapter {', '.join(adapters)}")
    inside = {id(module) for module in find_blocks(model).modules()}
    styles: dict[str, set[str]] = {name: {style} for name, style in rules.items()}
    for name, style in layers.items():
        if id(model.get_submodule(name)) in inside:
            styles.setdefault(name.rpartition(".")[0], set()).add(style)
    for name, of_module in styles.items():
        if of_module != {"colwise", "rowwise"}:
            what = "the plan for this type of model does not say where tensor ranks need all tokens"
            found = f"{name}: {', '.join(sorted(of_module))}"
            raise ConfigError(what, where=SEQUENCE, found=found)
    return list(styles)


def whole_in_blocks(model: PreTrainedModel, layers: dict[str, str]) -> Iterator[str]:
    """List the parameters of blocks that each rank has whole, and so the gradient of its tokens; norms, for example."""
    inside = {id(parameter) for parameter in find_blocks(model).parameters()}
    for name, parameter in model.named_parameters():
        module, _, own = name.rpartition(".")
        is_divided = module in layers and (own == "weight" or layers[module] == "colwise")
        if id(parameter) in inside and not is_divided:
            yield name


class TokenShares:
    """Exchanges of tokens between the ranks of a group, each with the exchange of its gradient.

    The last parts are filled up with zeros if the number of ranks does not divide the tokens.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._num_tokens = 0
        """Of the sequences that the running block has a part of."""

    def split_blocks(self, model: PreTrainedModel, readers: list[str]) -> None:
        """Let the blocks of a model compute with parts of sequences, and `readers` in them with whole ones."""
        blocks = find_blocks(model)
        for block in blocks:
            # Before each block: one that is computed again must not count the tokens of a later forward.
            block.register_forward_pre_hook(self._count, with_kwargs=True)
        blocks[0].register_forward_pre_hook(lambda block, args: (self._exchange(args[0], _own, _gather), *args[1:]))
        blocks[-1].register_forward_hook(self._join)
        for name in readers:
            model.get_submodule(name).register_forward_pre_hook(self._read_all, with_kwargs=True)

    def sum_up(self, value: torch.Tensor) -> torch.Tensor:
        """Give this rank's tokens of the sum of what the ranks have computed."""
        return self._exchange(value, _reduce, _gather)

    def _count(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("position_ids") is None:
            what = "blocks of this type are not told the positions of tokens"
            raise ConfigError(what, where=SEQUENCE, hint=f"{SEQUENCE}=false")
        self._num_tokens = kwargs["position_ids"].shape[-1]

    def _join(self, block: nn.Module, args: Any, output: Any) -> torch.Tensor:
        if not isinstance(output, torch.Tensor):
            what = "blocks of this type give more than one tensor"
            raise ConfigError(what, where=SEQUENCE, found=type(block).__name__, hint=f"{SEQUENCE}=false")
        return self._exchange(output, _gather, _own)

    def _read_all(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (self._exchange(args[0], _gather, _reduce), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self._exchange(kwargs["hidden_states"], _gather, _reduce)}

    def _exchange(self, value: torch.Tensor, forward: Exchange, backward: Exchange) -> torch.Tensor:
        exchanged: torch.Tensor = _Exchange.apply(value, forward, backward, self._num_tokens, self._group)
        return exchanged


class _Exchange(torch.autograd.Function):
    """Exchange tokens, and their gradient in the other way."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, there: Exchange, back: Exchange, num_tokens: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.back = back, num_tokens, group
        return there(value, num_tokens, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        back, num_tokens, group = ctx.back
        return back(gradients[0], num_tokens, group), None, None, None, None


def _filled_up(whole: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Give the tokens first, and as many as the ranks divide: [tokens, sequences, hidden size]."""
    return functional.pad(whole.transpose(0, 1), (0, 0, 0, 0, 0, -whole.shape[1] % num_ranks)).contiguous()


def _own(whole: torch.Tensor, num_tokens: int, group: dist.ProcessGroup) -> torch.Tensor:
    # A copy: else the whole tensor's memory would stay.
    return _filled_up(whole, group.size()).chunk(group.size())[group.rank()].transpose(0, 1).clone()


def _gather(part: torch.Tensor, num_tokens: int, group: dist.ProcessGroup) -> torch.Tensor:
    sent = part.transpose(0, 1).contiguous()
    gathered = sent.new_empty(len(sent) * group.size(), *sent.shape[1:])
    all_gather_single(gathered, sent, group=group)
    return gathered[:num_tokens].transpose(0, 1).contiguous()


def _reduce(whole: torch.Tensor, num_tokens: int, group: dist.ProcessGroup) -> torch.Tensor:
    sent = _filled_up(whole, group.size())
    total = sent.new_empty(len(sent) // group.size(), *sent.shape[1:])
    reduce_scatter_single(total, sent, group=group)
    return total.transpose(0, 1).contiguous()
