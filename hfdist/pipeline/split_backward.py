"""A backward in two halves: the gradients of inputs at once, those of parameters later.

    root -> d -> c -> b -> a -> input       the path: all nodes from which an input is reached
                 |         |
                 p         q                parameters hang off it, after nodes such as casts and transposes

The first half runs along the path and keeps the gradients that arrive at its branches, here c and a. The second half
runs from the branches to the parameters. If a parameter hangs off several branches, what flows from one of them along
the path to another is replaced by what arrived there in the first half.

torch has the same in its pipelining package, but there a parameter that is used twice can be counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class _Start(NamedTuple):
    """Where the second half begins: a place in the graph, and the gradient that arrived there."""

    edge: GradientEdge
    gradient: torch.Tensor


class _Group(NamedTuple):
    """Nodes with leaves in common, and all their leaves."""

    nodes: set[Node]
    leaves: set[Node]


def backward_inputs(
    roots: Sequence[torch.Tensor],
    root_gradients: Sequence[torch.Tensor] | None,
    inputs: Iterable[torch.Tensor],
    parameters: Iterable[torch.Tensor],
) -> Callable[[], None]:
    """Add gradients to `inputs`, as `torch.autograd.backward` would, and leave those of `parameters` for later.

    Args:
        roots: what goes backward; all of them want gradients.
        root_gradients: theirs; None for a loss.
        inputs: leaves, of which some may want no gradient.
        parameters: leaves likewise.

    Returns:
        What adds the gradients of the parameters, once. Until it is let go the graph is kept.
    """
    gradients = [torch.ones_like(root) for root in roots] if root_gradients is None else root_gradients
    starts = [_Start(get_gradient_edge(root), gradient) for root, gradient in zip(roots, gradients, strict=True)]
    wanting = [tensor for tensor in inputs if tensor.requires_grad]
    leaves = {get_gradient_edge(parameter).node: parameter for parameter in parameters if parameter.requires_grad}
    ends = {get_gradient_edge(tensor).node for tensor in wanting}
    path, hanging = _explore([start.edge.node for start in starts], ends, leaves)
    arrived: dict[Node, tuple[torch.Tensor | None, ...]] = {}
    hooks = [node.register_prehook(partial(arrived.__setitem__, node)) for node in path if hanging[node]]
    if path:
        torch.autograd.backward(list(roots), list(gradients), retain_graph=True, inputs=wanting)
    for hook in hooks:
        hook.remove()
    # From a root beside the path everything is left to do.
    beside = [start for start in starts if start.edge.node not in path]
    groups = _group({node: hanging[node] for node in (*arrived, *(start.edge.node for start in beside))})

    def backward_parameters() -> None:
        for nodes, own in groups:
            _backward_group(
                [start for start in beside if start.edge.node in nodes],
                {node: arrived[node] for node in nodes if node in arrived},
                [leaves[leaf] for leaf in own],
            )

    return backward_parameters


def _backward_group(
    beside: list[_Start], arrived: dict[Node, tuple[torch.Tensor | None, ...]], parameters: list[torch.Tensor]
) -> None:
    starts = beside + [
        _Start(GradientEdge(node, index), gradient)
        for node, gradients in arrived.items()
        for index, gradient in enumerate(gradients)
        if gradient is not None
    ]
    clamps = [node.register_prehook(lambda _, known=known: known) for node, known in arrived.items()]
    torch.autograd.backward(
        [start.edge for start in starts],
        [start.gradient for start in starts],
        retain_graph=True,
        inputs=parameters,
    )
    for clamp in clamps:
        clamp.remove()


def _explore(
    roots: list[Node], ends: Collection[Node], leaves: Collection[Node]
) -> tuple[set[Node], dict[Node, set[Node]]]:
    """Give the path, and for every node the leaves that are reached from it beside the path."""
    path: set[Node] = set()
    hanging: dict[Node, set[Node]] = {}
    todo = [(root, False) for root in roots]
    while todo:
        node, is_below_done = todo.pop()
        children = [child for child, _ in node.next_functions if child is not None]
        if is_below_done:
            if node in ends or any(child in path for child in children):
                path.add(node)
            hanging[node].update(*(hanging[child] for child in children if child not in path))
        elif node not in hanging:
            hanging[node] = {node} if node in leaves else set()
            todo += [(node, True), *((child, False) for child in children)]
    return path, hanging


def _group(hanging: dict[Node, set[Node]]) -> list[_Group]:
    """Put nodes together that have leaves in common; leave out nodes without."""
    group_of_leaf: dict[Node, _Group] = {}
    for node, own in hanging.items():
        group = _Group({node}, set(own))
        for joined in [group_of_leaf[leaf] for leaf in own if leaf in group_of_leaf]:
            group.nodes.update(joined.nodes)
            group.leaves.update(joined.leaves)
        group_of_leaf.update(dict.fromkeys(group.leaves, group))
    return list({id(group): group for group in group_of_leaf.values()}.values())
