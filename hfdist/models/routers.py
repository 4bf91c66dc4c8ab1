"""The routers of a mixture of experts: found, watched, and the loss that balances them, as transformers defines it.

    loss = coefficient x experts x sum over experts of (its choices / rows) x (its mean probability)

A row is a token in one router. Choices and probabilities are those of all layers and of the whole global batch. Once
the choices of all rows are known, the loss is a sum over rows, so any part of the batch adds its share.
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
"""Attribute in which a router keeps what it gave."""

T = TypeVar("T")


class Routing(NamedTuple):
    """What one router gave in a forward."""

    layer: int
    """The router's number among those of the whole model."""
    logits: torch.Tensor
    """[rows, experts]."""
    choices: torch.Tensor | None
    """Numbers of the chosen experts, [rows, experts per token]; None: the router does not tell."""


@dataclass(frozen=True, kw_only=True)
class BalancingLoss:
    """The loss of one model over its routers."""

    coefficient: float
    """0: the model adds none."""
    top_k: int
    """Experts per token; 0: not known, so only routers count that tell what they choose."""

    def count(self, routings: list[Routing], counted: torch.Tensor | None, totals: RoutingSums) -> None:
        """Add the rows of a forward to `totals`, without gradients."""
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
        """Give what the loss is multiplied by for each expert and row, [experts]; `totals` are of the global batch."""
        rows = totals.best.sum() / self.top_k
        return self.coefficient * len(totals.best) * totals.best / rows**2

    @staticmethod
    def share(routings: list[Routing], counted: torch.Tensor | None, weights: torch.Tensor) -> torch.Tensor:
        """Give the share of a forward in the loss of the global batch, with gradients."""
        weights = weights.float()
        shares = [
            (functional.softmax(logits, -1, dtype=torch.float32) @ weights * _weights_of_rows(logits, counted)).sum()
            for _, logits, _ in routings
        ]
        return torch.stack(shares).sum()


class RoutingSums(NamedTuple):
    """Sums over the rows of a batch."""

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
    totals.scatter_add_(0, choices.flatten().long(), rows.repeat_interleave(choices.shape[-1]).to(totals.dtype))


class Routers:
    """Watches the routers of a model, or of this rank's part of it.

    Hooks that change what routers give must be registered before.
    """

    def __init__(self, model: nn.Module) -> None:
        base = base_of(model)
        self.loss = balancing_loss(base)
        self._found = list(find_routers(base))
        self.num_layers = len(self._found)
        self.is_watching = False
        """Whether routers keep what they give; it must not change between a forward and its backward."""
        self._hooks = [module.register_forward_hook(self._keep) for module, _ in self._found]

    def _keep(self, module: nn.Module, args: object, output: Any) -> None:
        # Nothing here differs between layers; otherwise torch.compile would compile each block separately.
        if self.is_watching:
            # Without a loss over routers no graph is needed: in the backward of a block that is computed again, it
            # would hold what the block keeps until all of the backward ends.
            module.hfdist_output = output if self.loss.coefficient else _detached(output)

    def take(self) -> list[Routing]:
        """Give what routers have kept, and free it."""
        kept = [(layer, index, vars(module).pop(_KEPT, None)) for layer, (module, index) in enumerate(self._found)]
        return [found for layer, index, output in kept if (found := self._routing(layer, index, output)) is not None]

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def _routing(self, layer: int, index: int, output: object) -> Routing | None:
        if output is None:
            return None
        outputs = output if isinstance(output, tuple) else (output,)
        logits = outputs[index]
        if logits.ndim != 2:
            return None
        whole = [value for value in outputs if isinstance(value, torch.Tensor) and not value.is_floating_point()]
        # A wider tensor of integers marks experts, one number for each.
        most = max(self.loss.top_k, logits.shape[-1] - 1)
        choices = next((value for value in whole if value.ndim == 2 and value.shape[1] <= most), None)
        return Routing(layer, logits, choices) if choices is not None or self.loss.top_k else None


def _detached(output: object) -> Any:
    if isinstance(output, tuple):
        return tuple(map(_detached, output))
    return output.detach() if isinstance(output, torch.Tensor) else output


def find_routers(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """List routers in the order of the model, each with the place of its logits in what it returns.

    They are those whose logits transformers returns on request.
    """
    owners = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    given = [owner.can_record_outputs.get("router_logits", []) for owner in owners]
    recorders = [recorder for listed in given for recorder in (listed if isinstance(listed, list) else [listed])]
    for name, module in model.named_modules():
        index = next((recorder.index for recorder in recorders if _is_meant(recorder, name, module)), None)
        if index is not None:
            yield module, index


def _is_meant(recorder: object, name: str, module: nn.Module) -> bool:
    if not isinstance(recorder, OutputRecorder) or not isinstance(module, recorder.target_class):
        return False
    return recorder.layer_name is None or f".{recorder.layer_name.strip('.')}." in f".{name}."


def base_of(model: nn.Module) -> nn.Module:
    """Give the model without the wrapper of adapters."""
    unwrap = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()


def balancing_loss(model: nn.Module) -> BalancingLoss:
    """Read the loss over routers off a model's config, or off the model itself."""
    owners = (model.config.get_text_config(), model) if isinstance(model, PreTrainedModel) else ()

    def read(*names: str) -> Any:
        given = (getattr(owner, name, None) for name in names for owner in owners)
        return next((value for value in given if isinstance(value, (int, float))), 0)

    coefficient = read("router_aux_loss_coef", "aux_loss_coef") if adds_router_loss(model) else 0.0
    return BalancingLoss(coefficient=float(coefficient), top_k=read("num_experts_per_tok"))


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
