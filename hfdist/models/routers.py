"""The routers of a mixture of experts, and the loss that balances them over a global batch as transformers defines it.

    loss = coefficient x experts x sum over experts of (its choices / rows) x (its mean probability)

A row is a token in one router. Choices and probabilities are those of all layers and of the whole global batch. Once
the choices of all rows are known, the loss is a sum over rows, so any part of the batch adds its share:

    forward of each micro batch     count: choices and probabilities are added to `RoutingSums`
    all ranks                       the sums are added up; weights: a factor for each expert
    forward again                   share: the probabilities of the rows, times these factors
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

COUNTED = "hfdist_counted"
"""Key of a batch for a mask of the tokens that count, [sequences, tokens]: not padding, nor rows that fill it up."""

ROUTER_FLAG = "output_router_logits"
"""Field of a config: whether the model adds the loss over routers."""
_KEPT = "hfdist_output"
"""Attribute of a router's module: its output in the forward that runs now."""

T = TypeVar("T")


class Routing(NamedTuple):
    """The output of one router in a forward."""

    layer: int
    """The router's number among those of the whole model."""
    logits: torch.Tensor
    """Logits of each expert, [rows, experts]."""
    choices: torch.Tensor | None
    """Numbers of the chosen experts, [rows, experts per token]; None: the router does not give them."""


@dataclass(frozen=True, kw_only=True)
class BalancingLoss:
    """The loss of one model over its routers."""

    coefficient: float
    """Factor of the loss; 0: the model adds no loss over routers."""
    top_k: int
    """Experts per token; 0: not known, so only routers count that give their choices."""

    def count(self, routings: list[Routing], counted: torch.Tensor | None, totals: RoutingSums) -> None:
        """Add the rows of a forward to `totals`, in place and without gradients.

        Args:
            routings: the outputs of the routers.
            counted: 1 for each token that counts, [sequences, tokens]; None: all do.
            totals: sums over the rows of a batch.
        """
        with torch.no_grad():
            for layer, logits, choices in routings:
                rows = _weights_of_rows(logits, counted)
                if choices is None or self.coefficient:
                    probabilities = functional.softmax(logits, -1, dtype=torch.float32)
                    best = probabilities.topk(self.top_k, -1).indices
                    _add(totals.best, best, rows)
                    totals.probabilities.add_((probabilities * rows[:, None]).sum(0))
                    choices = best if choices is None else choices
                _add(totals.choices[layer], choices, rows)

    def weights(self, totals: RoutingSums) -> torch.Tensor:
        """Give the factors of each expert's probability in the loss, [experts]; `totals` are of the global batch."""
        rows = totals.best.sum() / self.top_k
        return self.coefficient * len(totals.best) * totals.best / rows**2

    @staticmethod
    def share(routings: list[Routing], counted: torch.Tensor | None, weights: torch.Tensor) -> torch.Tensor:
        """Give the share of a forward in the loss of the global batch, with gradients.

        Args:
            routings: the outputs of the routers.
            counted: 1 for each token that counts, [sequences, tokens]; None: all do.
            weights: the factors of experts, [experts], as `weights` gives them.
        """
        weights = weights.float()
        shares = []
        for routing in routings:
            probabilities = functional.softmax(routing.logits, -1, dtype=torch.float32)
            shares.append((probabilities @ weights * _weights_of_rows(routing.logits, counted)).sum())
        return torch.stack(shares).sum()


class RoutingSums(NamedTuple):
    """Sums over the rows of a batch, from which the loss over routers follows."""

    choices: torch.Tensor
    """How often each expert was chosen, [layers, experts]."""
    best: torch.Tensor
    """How often each expert was among those with the highest probabilities, as the loss counts it, [experts]."""
    probabilities: torch.Tensor
    """Sum of each expert's probabilities, [experts]."""

    @classmethod
    def of(cls, whole: torch.Tensor) -> RoutingSums:
        """Give the sums as views of one tensor of shape [layers + 2, experts], which can be reduced as a whole."""
        return cls(whole[:-2], whole[-2], whole[-1])


def _weights_of_rows(logits: torch.Tensor, counted: torch.Tensor | None) -> torch.Tensor:
    """Give 1 for each row that counts and 0 for others, [rows]."""
    return logits.new_ones(len(logits), dtype=torch.float32) if counted is None else counted.flatten().float()


def _add(totals: torch.Tensor, choices: torch.Tensor, rows: torch.Tensor) -> None:
    """Add to `totals`, [experts], how often each expert is in `choices`, [rows, k]; `rows` are weights, [rows]."""
    totals.scatter_add_(0, choices.flatten().long(), rows.repeat_interleave(choices.shape[-1]).to(totals.dtype))


class Routers:
    """Watches the routers of a model, or of this rank's part of it, by forward hooks.

    Other hooks that change a router's output must be registered before.
    """

    def __init__(self, model: nn.Module) -> None:
        base = base_of(model)
        self.loss = balancing_loss(base)
        self._routers = list(find_routers(base))
        self.num_layers = len(self._routers)
        self.is_watching = False
        """Whether routers keep their outputs; it must not change between a forward and its backward."""
        self._hooks = [router.module.register_forward_hook(self._keep) for router in self._routers]

    def _keep(self, module: nn.Module, args: object, output: Any) -> None:
        """Let a router keep its output."""
        # Nothing here differs between layers; otherwise torch.compile would compile each block separately.
        if self.is_watching:
            # Without a loss over routers no graph is needed: in the backward of a block that is computed again, it
            # would hold what the block keeps until all of the backward ends.
            module.hfdist_output = output if self.loss.coefficient else _detached(output)

    def take(self) -> list[Routing]:
        """Give the outputs that routers have kept, and free them."""
        routings = []
        for layer, router in enumerate(self._routers):
            output = vars(router.module).pop(_KEPT, None)
            routing = None if output is None else self._routing(layer, router.logits_index, output)
            if routing is not None:
                routings.append(routing)
        return routings

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def _routing(self, layer: int, logits_index: int, output: object) -> Routing | None:
        """Read a router's output; None: it has no row of logits for each token, or its choices cannot be known."""
        outputs = output if isinstance(output, tuple) else (output,)
        logits = outputs[logits_index]
        if logits.ndim != 2:
            return None
        integers = [value for value in outputs if isinstance(value, torch.Tensor) and not value.is_floating_point()]
        # A tensor of integers as wide as there are experts is a mask of them, and no list of numbers.
        most_choices = max(self.loss.top_k, logits.shape[-1] - 1)
        choices = next((value for value in integers if value.ndim == 2 and value.shape[1] <= most_choices), None)
        if choices is None and self.loss.top_k == 0:
            return None
        return Routing(layer, logits, choices)


def _detached(output: object) -> Any:
    """Give a router's output with its tensors out of the graph."""
    if isinstance(output, tuple):
        return tuple(map(_detached, output))
    return output.detach() if isinstance(output, torch.Tensor) else output


class Router(NamedTuple):
    """A router of a model."""

    module: nn.Module
    logits_index: int
    """Place of the logits in the tuple that the module returns."""


def find_routers(model: nn.Module) -> Iterator[Router]:
    """List the routers whose logits transformers returns on request, in the order of the model."""
    recorders: list[Any] = []
    for owner in model.modules():
        if isinstance(owner, PreTrainedModel):
            # One recorder, or a list of them.
            recorded = owner.can_record_outputs.get("router_logits", [])
            recorders += recorded if isinstance(recorded, list) else [recorded]
    for name, module in model.named_modules():
        index = next((recorder.index for recorder in recorders if _records(recorder, name, module)), None)
        if index is not None:
            yield Router(module, index)


def _records(recorder: object, name: str, module: nn.Module) -> bool:
    """Whether a recorder of transformers is for this module, by its class and its name in the model."""
    if not isinstance(recorder, OutputRecorder) or not isinstance(module, recorder.target_class):
        return False
    return recorder.layer_name is None or f".{recorder.layer_name.strip('.')}." in f".{name}."


def base_of(model: nn.Module) -> nn.Module:
    """Give the model without the wrapper of adapters."""
    unwrap = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()


def balancing_loss(model: nn.Module) -> BalancingLoss:
    """Read the loss over routers off a model's config, or off attributes of the model itself."""
    owners = (model.config.get_text_config(), model) if isinstance(model, PreTrainedModel) else ()

    def read(*names: str) -> int | float:
        """Give the first number of these names; 0: there is none."""
        values = (getattr(owner, name, None) for name in names for owner in owners)
        return next((value for value in values if isinstance(value, (int, float))), 0)

    coefficient = read("router_aux_loss_coef", "aux_loss_coef") if adds_router_loss(model) else 0.0
    return BalancingLoss(coefficient=float(coefficient), top_k=int(read("num_experts_per_tok")))


def adds_router_loss(model: nn.Module) -> bool:
    """Whether the model's config asks for the loss over routers."""
    text_config = getattr(getattr(model, "config", None), "get_text_config", None)
    return text_config is not None and bool(getattr(text_config(), ROUTER_FLAG, False))


def leave_out_router_loss(model: nn.Module) -> None:
    """Leave the loss over routers out of the model's own loss, in all forwards: the model knows one micro batch only.

    Call it before the model is split or sharded.
    """
    base = base_of(model)
    if isinstance(base, PreTrainedModel) and hasattr(base.config.get_text_config(), ROUTER_FLAG):
        base.register_forward_pre_hook(_without_router_loss, with_kwargs=True)


def _without_router_loss(module: nn.Module, args: T, kwargs: dict[str, object]) -> tuple[T, dict[str, object]]:
    return args, kwargs | {ROUTER_FLAG: False} if adds_router_loss(module) else kwargs
