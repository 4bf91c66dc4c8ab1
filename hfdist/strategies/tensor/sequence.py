"""Sequence parallelism of tensor ranks: between attention and MLP each rank has a part of each sequence.

    first block's input     whole on each rank -> parts (scatter)
    attention, MLP          parts -> whole (gather), and at their end the sum over ranks -> parts (reduce-scatter)
    last block's output     parts -> whole on each rank (gather)

So norms and sums of residuals are computed once, and what a block keeps for its backward is divided. What was a sum
over the ranks is one in two halves, a reduce-scatter and a gather: in a ring they send as much. Of a gathered input a
rank keeps its part, and gathers it once more in the backward: a quarter more is sent. Korthikanti et al., 2022,
"Reducing Activation Recomputation in Large Transformer Models".
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hfdist.collectives import all_gather_single, reduce_scatter_single
from hfdist.errors import ConfigError
from hfdist.models.blocks import find_blocks
from hfdist.strategies.tensor.linear import split_dimensions

SEQUENCE = "strategy.sequence"

Exchange = Callable[[torch.Tensor, int, dist.ProcessGroup], torch.Tensor]
"""(part or whole, tokens of a sequence, ranks) -> whole or part; [sequences, tokens, hidden size]."""


def find_tensor_regions(model: PreTrainedModel, layers: dict[str, str]) -> list[str]:
    """Give the names of the modules that need whole sequences: each has layers `colwise`, and at its end a `rowwise`.

    Args:
        model: whole.
        layers: names and styles of its divided layers.

    Raises:
        ConfigError: a divided layer of the blocks is in no such module, or there is an adapter.
    """
    if adapters := getattr(model, "peft_config", {}):
        what = "tensor ranks share no tokens beside an adapter in this version"
        raise ConfigError(what, where=SEQUENCE, found=f"adapter {', '.join(adapters)}")
    inside = {id(module) for module in find_blocks(model).modules()}
    styles: dict[str, set[str]] = {}
    for name, style in layers.items():
        if id(model.get_submodule(name)) in inside:
            styles.setdefault(name.rpartition(".")[0], set()).add(style)
    for name, of_module in styles.items():
        if of_module != {"colwise", "rowwise"}:
            raise no_regions_error(name, ", ".join(sorted(of_module)))
    return list(styles)


def no_regions_error(name: str, style: str) -> ConfigError:
    """Make the error for a module or parameter that is divided otherwise."""
    what = "the plan for this type of model does not say where tensor ranks need all tokens"
    return ConfigError(what, where=SEQUENCE, found=f"{name}: {style}")


def partial_in_blocks(model: PreTrainedModel, layers: dict[str, str]) -> Iterator[str]:
    """List the parameters of blocks that each rank has whole, such as norms: it has the gradient of its tokens only."""
    inside = {id(parameter) for parameter in find_blocks(model).parameters()}
    for name, parameter in model.named_parameters():
        module, _, last = name.rpartition(".")
        is_divided = module in layers and last in split_dimensions(model.get_submodule(module), layers[module])
        if id(parameter) in inside and not is_divided:
            yield name


class SequenceParallel:
    """Lets the blocks of a model compute with parts of sequences, and the tensor regions in them with whole ones.

    The last parts are filled up with zeros if the number of ranks does not divide the tokens.

    Args:
        model: changed in place; other ranks of a pipeline may have the parameters of some blocks.
        group: the tensor ranks.
        regions: names of modules, from `find_tensor_regions`.
    """

    def __init__(self, model: PreTrainedModel, group: dist.ProcessGroup, regions: list[str]) -> None:
        self.group, self._regions = group, frozenset(regions)
        self._num_tokens = 0
        """Tokens of the whole sequences of which the running block has a part."""
        self.is_gathered = False
        """Whether whole sequences are computed: in a tensor region, up to its sum over the ranks."""
        self._is_repeated = False
        """Whether the running block is computed again in the backward: that gathers its inputs, too."""
        self._input: _GatheredInput | None = None
        """The input of the running tensor region, if only a part of it is to be kept."""
        self._dropout = _DropoutOfParts(self) if _has_dropout(model) else nullcontext()
        blocks = find_blocks(model)
        kinds = {kind: self._in_parts(kind) for kind in set(map(type, blocks))}
        for block in blocks:
            block.__class__ = kinds[type(block)]
        # Outside of what is computed again in the backward: a block's input is kept, and of this one a part, too.
        blocks[0].register_forward_pre_hook(lambda _, args: (self.scatter(args[0]), *args[1:]))
        blocks[-1].register_forward_hook(self._gather_output)
        for name in regions:
            model.get_submodule(name).register_forward_pre_hook(self._gather_input, with_kwargs=True)
        parent = next(module for module in model.modules() if blocks in module.children())
        # A function: a pipeline copies this module, and all that it has.
        parent.register_forward_hook(lambda _, __, output: self._gather_states(output))

    def has(self, layer: str) -> bool:
        """Whether a layer, by its name, belongs to a tensor region."""
        return layer.rpartition(".")[0] in self._regions

    def reduce_scatter(self, value: torch.Tensor) -> torch.Tensor:
        """Give this rank's part of the sum of what the ranks have computed."""
        self.is_gathered, self._input = False, None
        return self._exchange(value, _reduce_scatter, _gather)

    def linear(self, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Give what a layer makes of whole sequences, and keep a part of them for the backward."""
        gathered = self._input
        if gathered is None or not gathered.is_read_by(value):
            return functional.linear(value, weight, bias)
        # In two dimensions, as autograd keeps it: no other view of the same memory is there.
        rows = value.flatten(0, 1)
        with saved_tensors_hooks(partial(gathered.keep, rows.untyped_storage()._cdata), _unpack):
            return functional.linear(rows, weight, bias).unflatten(0, value.shape[:2])

    def scatter(self, whole: torch.Tensor) -> torch.Tensor:
        """Give this rank's part of what all ranks have whole."""
        self._num_tokens = whole.shape[1]
        return self._exchange(whole, _scatter, _gather)

    def whole_shape(self, part: torch.Tensor) -> tuple[int, ...]:
        """Give the shape of what `part` is of."""
        return (len(part), self._num_tokens, *part.shape[2:])

    def _in_parts(self, kind: type[nn.Module]) -> type[nn.Module]:
        """Derive a class of blocks, as FSDP2 does: hooks do not run where a block is computed again in the backward."""

        @wraps(kind.forward)
        def forward(block: nn.Module, *args: Any, **kwargs: Any) -> object:
            if kwargs.get("position_ids") is None:
                what = "blocks of this type are not told the positions of tokens"
                raise ConfigError(what, where=SEQUENCE, hint=f"{SEQUENCE}=false")
            # Each time: one that is computed again must not count the tokens of a later forward.
            self._num_tokens, self.is_gathered = kwargs["position_ids"].shape[-1], False
            self._is_repeated = block.training and bool(getattr(block, "gradient_checkpointing", False))
            with self._dropout if block.training else nullcontext():
                return kind.forward(block, *args, **kwargs)

        return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})

    def _gather_input(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.is_gathered = True
        part = args[0] if args else kwargs["hidden_states"]
        whole = self._exchange(part, _gather, _reduce_scatter)
        self._input = None if self._is_repeated else _GatheredInput(whole, part.detach(), self._num_tokens, self.group)
        return ((whole, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": whole})

    def _gather_output(self, block: nn.Module, args: Any, output: Any) -> torch.Tensor:
        if not isinstance(output, torch.Tensor):
            what = "blocks of this type give more than one tensor"
            raise ConfigError(what, where=SEQUENCE, found=type(block).__name__, hint=f"{SEQUENCE}=false")
        return self._exchange(output, _gather, _scatter)

    def _gather_states(self, output: Any) -> None:
        """Make the states that `output_hidden_states` asks for whole; those of the last block are."""
        if (states := getattr(output, "hidden_states", None)) is None:
            return
        size = _part_size(self._num_tokens, self.group)
        is_part = [state is not None and state.shape[1] == size for state in states]
        output["hidden_states"] = tuple(
            self._exchange(state, _gather, _scatter) if of_part else state
            for state, of_part in zip(states, is_part, strict=True)
        )

    def _exchange(self, value: torch.Tensor, there: Exchange, back: Exchange) -> torch.Tensor:
        exchanged: torch.Tensor = _Exchange.apply(value, there, back, self._num_tokens, self.group)
        return exchanged


class _GatheredInput:
    """The whole input of a tensor region: kept as a part, and gathered once in the backward for all its layers.

    Layers such as those of queries, keys and values share the part, and the whole one goes with the forward. In the
    backward the first of them gathers, and the last lets the whole one go.
    """

    def __init__(self, whole: torch.Tensor, part: torch.Tensor, num_tokens: int, group: dist.ProcessGroup) -> None:
        self._whole, self._part = weakref.ref(whole), part
        self._num_writes = whole._version
        """Not 0 for one sequence: then it is the memory into which was gathered."""
        self._num_tokens, self._group = num_tokens, group
        self._num_kept = self._num_left = 0
        """Tensors that layers have kept, and those of them that the backward has not asked for."""
        self._again: torch.Tensor | None = None

    def is_read_by(self, value: torch.Tensor) -> bool:
        """Whether a layer reads it as it was gathered."""
        # What was written in place since is kept as it is.
        return self._whole() is value and value._version == self._num_writes

    def keep(self, storage: int, kept: torch.Tensor) -> _GatheredInput | torch.Tensor:
        """Stand for the whole one, by its storage, in what autograd keeps of a layer; the weight it keeps itself."""
        if kept.untyped_storage()._cdata != storage:
            return kept
        self._num_kept += 1
        return self

    def gather(self) -> torch.Tensor:
        """Give the whole one in the backward, to one of those who kept it."""
        if self._again is None:
            self._again, self._num_left = _gather(self._part, self._num_tokens, self._group), self._num_kept
        again, self._num_left = self._again, self._num_left - 1
        if self._num_left == 0:
            self._again = None
        return again


def _unpack(kept: _GatheredInput | torch.Tensor) -> torch.Tensor:
    return kept.gather().flatten(0, 1) if isinstance(kept, _GatheredInput) else kept


class _DropoutOfParts(TorchFunctionMode):
    """Dropout of a part of a sequence: with this part of the mask that one process would draw.

    So the ranks of a group stay at the same place of their random numbers. Tensors as large as whole states are there
    while a mask is drawn; a byte for each element of the part is kept.
    """

    def __init__(self, sequence: SequenceParallel) -> None:
        super().__init__()
        self._sequence = sequence

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run a function of torch; of dropout in no tensor region its own way."""
        kwargs = kwargs or {}
        if function is not functional.dropout or self._sequence.is_gathered or not 0 < kwargs["p"] < 1:
            return function(*args, **kwargs)
        [part] = args
        if not kwargs["training"]:
            return part
        drawn = functional.dropout(part.new_ones(self._sequence.whole_shape(part)), kwargs["p"])
        dropped = _scatter(drawn == 0, drawn.shape[1], self._sequence.group)
        return part.masked_fill(dropped, 0) / (1 - kwargs["p"])


def _has_dropout(model: PreTrainedModel) -> bool:
    """Whether any dropout may be drawn: to look at each function of torch costs 3 microseconds."""
    fields = model.config.get_text_config().to_dict()
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in fields.items()) or any(
        isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()
    )


class _Exchange(torch.autograd.Function):
    """Exchange tokens, and their gradient in the other way."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, there: Exchange, back: Exchange, num_tokens: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.back = back, num_tokens, group
        # No view, as one sequence is of its tokens in another order: a writer in place would take FSDP2's hooks off it.
        return there(value, num_tokens, group).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        back, num_tokens, group = ctx.back
        return back(gradients[0], num_tokens, group), None, None, None, None


def _part_size(num_tokens: int, group: dist.ProcessGroup) -> int:
    return -(-num_tokens // group.size())


def _scatter(whole: torch.Tensor, num_tokens: int, group: dist.ProcessGroup) -> torch.Tensor:
    size = _part_size(num_tokens, group)
    part = whole[:, group.rank() * size :][:, :size]
    # Always a copy: else the whole tensor's memory would stay.
    return functional.pad(part, (0, 0, 0, size - part.shape[1]))


def _gather(part: torch.Tensor, num_tokens: int, group: dist.ProcessGroup) -> torch.Tensor:
    sent = part.transpose(0, 1).contiguous()
    gathered = sent.new_empty(len(sent) * group.size(), *sent.shape[1:])
    all_gather_single(gathered, sent, group=group)
    return gathered[:num_tokens].transpose(0, 1).contiguous()


def _reduce_scatter(whole: torch.Tensor, num_tokens: int, group: dist.ProcessGroup) -> torch.Tensor:
    # The ranks' parts one after the other.
    tokens, missing = whole.transpose(0, 1), -num_tokens % group.size()
    sent = (functional.pad(tokens, (0, 0, 0, 0, 0, missing)) if missing else tokens).contiguous()
    total = sent.new_empty(len(sent) // group.size(), *sent.shape[1:])
    reduce_scatter_single(total, sent, group=group)
    return total.transpose(0, 1).contiguous()
