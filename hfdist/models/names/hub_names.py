"""Finds the tensors that `save_pretrained` would write of a model: names, shapes, and their elements in the model.

A class may hold what its files have as many tensors in one: `experts.gate_up_proj` is `experts.0.gate_proj.weight` and
so on. transformers converts when it reads, and back when it writes. The way back is followed here on shapes alone, so
that each rank can write its part of each tensor, and read it.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

# Private: the public way, `save_pretrained`, wants whole tensors. tests/zoo/test_hub_names.py compares the two.
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from hfdist.models.names.follow import follow
from hfdist.models.names.strides import Block, UnfollowedError
from hfdist.models.partitioning import whole_shape

logger = logging.getLogger(__name__)

_Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class HubNames:
    """The tensors in the files of a whole model, and how they are made from the model's own tensors."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each tensor by its name, in the order in which transformers writes them."""
    blocks: Mapping[str, Sequence[tuple[str, Block]]]
    """Tensors in the files that hold a tensor of the model, by its name: their names, and the block that each holds."""
    num_parameters: int
    """Number of elements in all parameters of the model."""
    others: tuple[HubNames, ...] = field(default=(), repr=False)
    """Tensors that another start of this model may have written: one that read other files, or an earlier hfdist."""

    def names_of(self, model_names: Iterable[str]) -> set[str]:
        """Give the names of the tensors in the files that hold elements of these tensors of the model."""
        return {name for model_name in model_names for name, _ in self.blocks.get(model_name, ())}


_known: WeakKeyDictionary[nn.Module, HubNames] = WeakKeyDictionary()
"""The tensors of each model's files, as they were found while the model was whole."""


def find_hub_names(model: nn.Module) -> HubNames:
    """Give the tensors of a model's files.

    The first call must see the whole model, without an adapter; only ZeRO-3 may have partitioned its parameters. Later
    calls give the same.
    """
    if model not in _known:
        _keep_used_conversions(model)
        _known[model] = _find(model)
    return _known[model]


def _find(model: nn.Module) -> HubNames:
    """Follow transformers' conversions of a whole model: as it was read, and as it would be if it had not been read."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    shapes = {name: whole_shape(tensor) for name, tensor in tensors.items()}
    names = {id(tensor): name for name, tensor in tensors.items()}
    in_state = {name: names[id(t)] for name, t in model.state_dict(keep_vars=True).items() if id(t) in names}
    saved = _saved_once(model, in_state, shapes)
    num_parameters = sum(math.prod(shapes[name]) for name, _ in model.named_parameters())

    def names_after(convert: Callable[[_Tensors], _Tensors]) -> HubNames:
        made = follow({name: shapes[source] for name, source in saved.items()}, convert)
        blocks: dict[str, list[tuple[str, Block]]] = defaultdict(list)
        for name, tensor in made.items():
            for block in tensor.blocks:
                source = saved[block.name]
                blocks[source].append((name, replace(block, name=source)))
        made_shapes = {name: tensor.shape for name, tensor in made.items()}
        return HubNames(shapes=made_shapes, blocks=dict(blocks), num_parameters=num_parameters)

    as_it_is = names_after(lambda tensors: tensors)
    if not isinstance(model, PreTrainedModel):
        return as_it_is
    try:
        converted = names_after(lambda tensors: revert_weight_conversion(model, tensors))
    except UnfollowedError as error:
        logger.warning("weights are saved under the names that %s has for them: %s", type(model).__name__, error)
        return as_it_is
    others = [as_it_is]
    with _as_made_from_config(model) as is_other, suppress(UnfollowedError):
        if is_other:
            others.insert(0, names_after(lambda tensors: revert_weight_conversion(model, tensors)))
    return replace(converted, others=tuple(other for other in others if other.blocks != converted.blocks))


def _saved_once(model: nn.Module, in_state: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Choose the names under which tensors are saved: one for tied ones.

    Args:
        model: the whole model.
        in_state: names of parameters and buffers, by the name of the same tensor in the model's state.
        shapes: whole shapes of parameters and buffers, by name.

    Returns:
        The entries of `in_state` that are saved.
    """
    once = {name: own for name, own in in_state.items() if name == own}
    if not isinstance(model, PreTrainedModel):
        return once
    ignored = set(model._keys_to_ignore_on_save or ())
    given: _Tensors = {
        name: torch.empty(shapes[own], device="meta") for name, own in in_state.items() if name not in ignored
    }
    try:
        # Tensors without values are told apart by the model's own tensors.
        return {name: in_state[name] for name in remove_tied_weights_from_state_dict(given, model)}
    except RuntimeError:
        # Tied by the user's code, which transformers would refuse to save.
        return {name: own for name, own in once.items() if name not in ignored}


def _keep_used_conversions(model: nn.Module) -> None:
    """Let transformers forget conversions that matched nothing in the files, such as those of old names of norms.

    transformers does so itself, but not under ZeRO-3: there it notes all conversions that it knows, and would revert
    them when it writes.
    """
    read_with = vars(model).get("_weight_conversions")
    if read_with is not None:
        vars(model)["_weight_conversions"] = [conversion for conversion in read_with if conversion.was_used()]


@contextmanager
def _as_made_from_config(model: nn.Module) -> Iterator[bool]:
    """Let the model seem not to be read from files, in this context; yields whether it was read from files."""
    # A write reverts the conversions with which the model was read. Of a model that was not read, it reverts those of
    # the model's class.
    read_with = vars(model).pop("_weight_conversions", None)
    try:
        yield read_with is not None
    finally:
        if read_with is not None:
            vars(model)["_weight_conversions"] = read_with
