"""Several optimizers stepped as one, and one that is made so: Muon for matrices, AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

Group = dict[str, Any]
"""A group of parameters, as torch's optimizers have them: `params`, and settings."""

_PART = "part"
"""Key in a group of parameters: which of the optimizers steps it."""


class Joined(torch.optim.Optimizer):
    """Groups and state are kept here, so that schedules, checkpoints and DeepSpeed see one optimizer.

    Args:
        parts: at least one; their groups may be empty.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        for number, part in enumerate(self.parts):
            for group in part.param_groups:
                group[_PART] = number
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        for part in self.parts:
            self.state.update(part.state)

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Step each of them once."""
        loss = _loss_of(closure)
        for part, groups in of_parts(self, self.param_groups):
            # Each time: whoever loads or wraps an optimizer puts others in their place.
            part.param_groups, part.state = groups, self.state
            part.step()
        return loss

    def __repr__(self) -> str:
        return " and ".join(type(part).__name__ for part in self.parts)


def of_parts(optimizer: torch.optim.Optimizer, groups: list[Group]) -> list[tuple[torch.optim.Optimizer, list[Group]]]:
    """Give the optimizers that step these groups, each with its own; of one alone, all."""
    if not isinstance(optimizer, Joined):
        return [(optimizer, groups)]
    return [
        (part, [group for group in groups if group[_PART] == number]) for number, part in enumerate(optimizer.parts)
    ]


class Muon(torch.optim.Muon):
    """torch's Muon for stacks of matrices, too: those of the last two dimensions are stepped each by itself.

    To each it does what torch's class does to a matrix, but for how kernels round.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Step all that has a gradient."""
        loss = _loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: Group) -> None:
        state, momentum, rate = self.state[parameter], group["momentum"], float(group["lr"])
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        momentum_buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(momentum_buffer, momentum) if group["nesterov"] else momentum_buffer
        update = orthogonalize(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rows, columns = parameter.shape[-2:]
        rms_factor = 0.2 * math.sqrt(max(rows, columns))
        factor = rms_factor if group["adjust_lr_fn"] == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
        parameter.mul_(1 - rate * group["weight_decay"]).add_(update, alpha=-rate * factor)


def orthogonalize(
    matrices: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> torch.Tensor:
    """Run Muon's iteration (Newton-Schulz, of the fifth order) on each matrix of a tensor.

    Args:
        matrices: [..., rows, columns]. One of zeros stays so.
        coefficients: of the first, third and fifth power.
        num_steps: of the iteration.
        eps: the least norm by which a matrix is divided.

    Returns:
        Of the same shape, in bfloat16, in which it computes.
    """
    first, third, fifth = coefficients
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if is_tall else matrices
    found = wide.reshape(-1, *wide.shape[-2:]).bfloat16()
    found = found / torch.linalg.matrix_norm(found, keepdim=True).clamp(min=eps)
    for _ in range(num_steps):
        gram = found @ found.mT
        powers = torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth)
        found = torch.baddbmm(found, powers, found, beta=first)
    found = found.view(wide.shape)
    return found.mT if is_tall else found


def _loss_of(closure: Callable[[], object] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class MuonWithAdamW:
    """Makes the optimizer of a model, as `optimizer_cls_and_kwargs` of a Trainer wants it.

        hfdist.Trainer(..., optimizer_cls_and_kwargs=(hfdist.MuonWithAdamW, {"lr": 3e-4}))

    Muon steps matrices, but for embeddings and the head, which AdamW steps like vectors. Experts that are one tensor
    are a stack of matrices: each expert's is orthogonalized by itself, and `gate_up_proj` as the one matrix that it is.
    """

    def __call__(
        self,
        model: nn.Module,
        *,
        lr: float = 3e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        adjust_lr_fn: str | None = "match_rms_adamw",
        **of_muon: Any,
    ) -> Joined:
        """Make it.

        Args:
            model: whole, or a rank's part of it.
            lr: of both; `adjust_lr_fn` makes Muon's steps about as long as AdamW's, so that one rate fits both.
            weight_decay: of all matrices.
            betas: AdamW's.
            eps: AdamW's.
            adjust_lr_fn: of `torch.optim.Muon`, and so are the following.
            of_muon: momentum, nesterov, ns_coefficients, ns_steps.
        """
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        stacked, looked_up = set(map(id, stacks_of_experts(model))), embeddings_and_head(model)
        # Under ZeRO-3, parameters are empty but for their share.
        num_dimensions = {id(p): len(getattr(p, "ds_shape", p.shape)) for p in trained}

        def is_matrix(parameter: nn.Parameter) -> bool:
            # Others of three dimensions, such as convolutions, are no stacks.
            of_matrix = 3 if id(parameter) in stacked else 2
            return num_dimensions[id(parameter)] == of_matrix and id(parameter) not in looked_up

        matrices, others = [p for p in trained if is_matrix(p)], [p for p in trained if not is_matrix(p)]
        adamw: list[Group] = [
            {"params": [p for p in others if num_dimensions[id(p)] >= 2], "weight_decay": weight_decay},
            {"params": [p for p in others if num_dimensions[id(p)] < 2], "weight_decay": 0.0},
        ]
        # Muon's constructor counts dimensions, which a share of a matrix has not. So it gets the matrices after it.
        muon = Muon([torch.zeros(1, 1)], lr=lr, weight_decay=weight_decay, adjust_lr_fn=adjust_lr_fn, **of_muon)
        muon.param_groups[0]["params"] = matrices
        return Joined([muon, torch.optim.AdamW(adamw, lr=lr, betas=betas, eps=eps)])


def stacks_of_experts(model: nn.Module) -> Iterator[nn.Parameter]:
    """List the parameters that have a dimension for the experts: transformers calls classes of such modules so."""
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            yield from module.parameters(recurse=False)


def embeddings_and_head(model: nn.Module) -> set[int]:
    """Give the ids of the parameters of all embeddings, and of the head that gives logits, where there is one."""
    modules: list[nn.Module | None] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if hasattr(model, "get_output_embeddings"):
        head: Any = model.get_output_embeddings
        modules.append(head())
    return {id(parameter) for module in modules if module is not None for parameter in module.parameters()}
