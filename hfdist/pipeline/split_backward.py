"""A backward in two halves: the gradients of inputs at once, those of matrices later.

    root -> d -> c -> b -> a -> input       the path: all nodes from which an input is reached
                 |         |
                 p         q                parameters hang off it, after nodes such as casts and transposes

The first half runs along the path and keeps the gradients that arrive at its branches, here c and a. The second half
runs from the branches to the parameters. If a parameter hangs off several branches, what flows from one of them along
the path to another is replaced by what arrived there in the first half.

Each call of autograd walks through all that can be reached, so branches of which none is reached from another, such as
queries, keys and values, share one call. Vectors, such as the weights of norms, get their gradients in the first half:
that costs less than to keep what they are made of.

torch has the same in its pipelining package, but there a parameter that is used twice can be counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_Gradients = tuple[torch.Tensor | None, ...]
"""What arrives at a node: a gradient for each of its outputs."""


class _Start(NamedTuple):
    """Where a backward begins: a place in the graph, and the gradient that arrived there."""

    edge: GradientEdge
    gradient: torch.Tensor


class _Group(NamedTuple):
    """Nodes from which one call of autograd begins, and the leaves to which it goes."""

    nodes: set[Node]
    leaves: set[Node]


class _Paths(NamedTuple):
    """What a backward runs through."""

    heights: dict[Node, int]
    """The path: for each node the most branches on a way from it to an input, itself included."""
    hanging: dict[Node, set[Node]]
    """For each node the leaves that are reached from it beside the path."""
    at_once: set[Node]
    """Those of them whose gradients come with the first half."""


def backward_inputs(
    roots: Sequence[torch.Tensor], root_gradients: Sequence[torch.Tensor] | None, inputs: Iterable[torch.Tensor]
) -> Callable[[], None]:
    """Add gradients to `inputs`, as `torch.autograd.backward` would, and leave those of most parameters for later.

    Args:
        roots: what goes backward; all of them want gradients.
        root_gradients: theirs; None for a loss.
        inputs: leaves, of which some may want no gradient. All other leaves are taken for parameters.

    Returns:
        What adds the gradients that are left, once. Until it is let go the graph is kept.
    """
    gradients = [torch.ones_like(root) for root in roots] if root_gradients is None else root_gradients
    starts = [_Start(get_gradient_edge(root), gradient) for root, gradient in zip(roots, gradients, strict=True)]
    ends = {get_gradient_edge(tensor).node: tensor for tensor in inputs if tensor.requires_grad}
    heights, hanging, at_once = _explore([start.edge.node for start in starts], ends)
    branches = {node: own for node in heights if (own := hanging[node] - at_once)}
    arrived: dict[Node, _Gradients] = {}
    hooks = [node.register_prehook(partial(arrived.__setitem__, node)) for node in branches]
    on_path = [start for start in starts if start.edge.node in heights]
    if on_path:
        _backward(on_path, [*ends.values(), *map(_tensor_of, at_once)])
    for hook in hooks:
        hook.remove()
    # From a root beside the path everything is left to do.
    beside = [start for start in starts if start.edge.node not in heights]
    left = {node: branches[node] for node in arrived}
    groups = _group(left | {start.edge.node: hanging[start.edge.node] for start in beside}, heights)

    def backward_parameters() -> None:
        while groups:
            # What a group alone has kept is freed with it.
            nodes, leaves = groups.pop()
            known = {node: arrived.pop(node) for node in nodes if node in arrived}
            _backward_group([start for start in beside if start.edge.node in nodes], known, leaves)

    return backward_parameters


def _backward_group(beside: list[_Start], arrived: Mapping[Node, _Gradients], leaves: Iterable[Node]) -> None:
    starts = beside + [
        _Start(GradientEdge(node, index), gradient)
        for node, gradients in arrived.items()
        for index, gradient in enumerate(gradients)
        if gradient is not None
    ]
    if not starts:
        return
    clamps = [node.register_prehook(lambda _, known=known: known) for node, known in arrived.items()]
    _backward(starts, list(map(_tensor_of, leaves)))
    for clamp in clamps:
        clamp.remove()


def _backward(starts: Sequence[_Start], inputs: Sequence[torch.Tensor]) -> None:
    edges, gradients = zip(*starts, strict=True)
    torch.autograd.backward(edges, gradients, retain_graph=True, inputs=inputs)


def _tensor_of(leaf: Node) -> torch.Tensor:
    tensor: torch.Tensor = leaf.variable  # type: ignore[attr-defined]  # of the nodes that add to a leaf's gradient
    return tensor


def _explore(roots: list[Node], ends: Collection[Node]) -> _Paths:
    heights: dict[Node, int] = {}
    hanging: dict[Node, set[Node]] = {}
    vectors: set[Node] = set()
    deferred: set[Node] = set()
    todo: list[tuple[Node, list[Node] | None]] = [(root, None) for root in roots]
    while todo:
        node, children = todo.pop()
        if children is None:
            if node in hanging:
                continue
            hanging[node] = own = set()
            children = [child for child, _ in node.next_functions if child is not None]
            if children:
                # The node comes again when all its children are known.
                todo.append((node, children))
                todo += [(child, None) for child in children if child not in hanging]
            elif node in ends:
                heights[node] = 0
            elif hasattr(node, "variable"):
                own.add(node)
                if _tensor_of(node).dim() < 2:
                    vectors.add(node)
            continue
        below = [heights[child] for child in children if child in heights]
        for child in children:
            if child not in heights and (beside := hanging[child]):
                hanging[node] = hanging[node] | beside
                if below and not beside <= vectors:
                    # Also a vector: the way to it may be that to a matrix.
                    deferred |= beside
        if below:
            heights[node] = max(below) + bool(hanging[node])
    deferred = deferred.union(*(hanging[root] for root in roots if root not in heights))
    return _Paths(heights, hanging, set().union(*(hanging[node] for node in heights)) - deferred)


def _group(hanging: dict[Node, set[Node]], heights: Mapping[Node, int]) -> list[_Group]:
    """Put nodes together that have leaves in common, and those of one height; the highest come last."""
    group_of_leaf: dict[Node, _Group] = {}
    for node, own in hanging.items():
        group = _Group({node}, set(own))
        for joined in [group_of_leaf[leaf] for leaf in own if leaf in group_of_leaf]:
            group.nodes.update(joined.nodes)
            group.leaves.update(joined.leaves)
        group_of_leaf.update(dict.fromkeys(group.leaves, group))
    alike: dict[tuple[int, int], _Group] = {}
    for number, group in enumerate({id(group): group for group in group_of_leaf.values()}.values(), 1):
        own_heights = {heights.get(node, 0) for node in group.nodes}
        # No branch is reached from another one of its height. By number: all ranks take groups in one order.
        key = max(own_heights), 0 if len(own_heights) == 1 else number
        together = alike.setdefault(key, _Group(set(), set()))
        together.nodes.update(group.nodes)
        together.leaves.update(group.leaves)
    return [alike[key] for key in sorted(alike)]
