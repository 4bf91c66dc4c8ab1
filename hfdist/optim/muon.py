"""Muon for matrices and stacks of them, and the optimizer that steps all else by AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfdist.optim.joined import Group, Joined, run_closure

_ADAMW_RMS = 0.2
"""Root mean square of AdamW's updates, which Muon's get with `match_rms_adamw` (Liu et al. 2025, arXiv:2502.16982)."""


class Muon(torch.optim.Muon):
    """torch's Muon (Jordan et al. 2024) for stacks of matrices, too: each matrix of a stack is stepped by itself.

    The update of a matrix is that of torch's class, but for how kernels round.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Step each parameter that has a gradient."""
        loss = run_closure(closure)
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
        rms_factor = _ADAMW_RMS * math.sqrt(max(rows, columns))
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


class MuonWithAdamW:
    """Makes the optimizer of a model, as `optimizer_cls_and_kwargs` of a Trainer wants it.

        hfdist.Trainer(..., optimizer_cls_and_kwargs=(hfdist.MuonWithAdamW, {"lr": 3e-4}))

    Muon steps matrices, but for embeddings and heads, which AdamW steps like vectors. Experts that are one tensor
    are a stack of matrices: each expert's is orthogonalized by itself, and `gate_up_proj` as the one matrix that it is.
    """

    # transformers takes only a class for a factory, and calls an instance of it: see `is_optimizer_factory`.
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
        """Make the optimizer of a model.

        Args:
            model: whole, or a rank's part of it.
            lr: learning rate of both; `adjust_lr_fn` makes Muon's steps about as long as AdamW's, so that one fits.
            weight_decay: decay of all matrices.
            betas: AdamW's.
            eps: AdamW's.
            adjust_lr_fn: see `torch.optim.Muon`.
            of_muon: further arguments of `torch.optim.Muon`: momentum, nesterov, ns_coefficients, ns_steps.
        """
        stacked, apart = set(map(id, stacks_of_experts(model))), embeddings_and_heads(model)
        matrices: list[nn.Parameter] = []
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            # Under ZeRO-3, parameters are empty but for their share.
            num_dimensions = len(getattr(parameter, "ds_shape", parameter.shape))
            # Others of three dimensions, such as convolutions, are no stacks.
            matrix_dimensions = 3 if id(parameter) in stacked else 2
            if num_dimensions < 2 or is_bias(name):
                others.append(parameter)
            elif num_dimensions == matrix_dimensions and id(parameter) not in apart:
                matrices.append(parameter)
            else:
                decayed.append(parameter)
        adamw: list[Group] = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        # Muon's constructor counts dimensions, of which ZeRO-3's share of a matrix has one. So it is made with a
        # stand-in, and gets the matrices afterwards.
        muon = Muon([torch.zeros(1, 1)], lr=lr, weight_decay=weight_decay, adjust_lr_fn=adjust_lr_fn, **of_muon)
        muon.param_groups[0]["params"] = matrices
        return Joined([muon, torch.optim.AdamW(adamw, lr=lr, betas=betas, eps=eps)])


def stacks_of_experts(model: nn.Module) -> Iterator[nn.Parameter]:
    """List the parameters with a dimension for the experts: transformers names the classes of such modules Experts."""
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            yield from module.parameters(recurse=False)


def is_bias(name: str) -> bool:
    """Whether a parameter is a bias by its name, as a stack of those of experts, which has two dimensions.

    transformers' Trainer decays none of them.
    """
    return "bias" in name


def embeddings_and_heads(model: nn.Module) -> set[int]:
    """Give the ids of the parameters of all embeddings, and of the heads of any task: logits, labels, scores, values.

    A head is what a model of transformers, perhaps in a wrapper, has outside of its `base_model`, or gives as its head.
    """
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding))
    apart = {id(parameter) for module in embeddings for parameter in module.parameters()}
    outermost = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if outermost is None:
        return apart
    inner: nn.Module = outermost.base_model
    apart |= {*map(id, outermost.parameters())} - {*map(id, inner.parameters())}
    # Some classes do not say what their base model is.
    head = outermost.get_output_embeddings()
    return apart if head is None else apart | {*map(id, head.parameters())}
