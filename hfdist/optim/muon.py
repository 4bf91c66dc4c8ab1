"""Muon for matrices, and the optimizer of a whole model: matrices by Muon, all other parameters by AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from hfdist.optim.joined import Group, Joined, run_closure

_ADAMW_RMS = 0.2
"""Root mean square of AdamW's updates, which Muon's get with `match_rms_adamw` (Liu et al. 2025, arXiv:2502.16982)."""


class Muon(torch.optim.Muon):
    """torch's Muon (Jordan et al. 2024), which also takes stacks of matrices, and steps each matrix by itself.

    A parameter of one matrix has the same update as in torch's class, but for how kernels round.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> Any:  # as torch has it: whatever a closure gives
        """Step each parameter that has a gradient, and give the loss of the closure; None: there is no closure."""
        loss = run_closure(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: Group) -> None:
        """Step one parameter by Muon's rule."""
        state, momentum, rate = self.state[parameter], group["momentum"], float(group["lr"])
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        direction = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        if group["nesterov"]:
            direction = gradient.lerp(direction, momentum)
        update = orthogonalize(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rows, columns = parameter.shape[-2:]
        # The two ways in which torch's class adjusts the rate to the shape.
        if group["adjust_lr_fn"] == "match_rms_adamw":
            factor = _ADAMW_RMS * math.sqrt(max(rows, columns))
        else:
            factor = math.sqrt(max(1, rows / columns))
        parameter.mul_(1 - rate * group["weight_decay"]).add_(update, alpha=-rate * factor)


def orthogonalize(
    matrices: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> torch.Tensor:
    """Make each matrix about orthogonal, by Muon's iteration (Newton-Schulz of the fifth order).

        X <- first X + third (X X^T) X + fifth (X X^T)^2 X

    Args:
        matrices: [..., rows, columns]. A matrix of zeros stays one.
        coefficients: `first`, `third` and `fifth`.
        num_steps: number of iterations.
        eps: the least norm by which a matrix is divided before the first iteration.

    Returns:
        The matrices, of the same shape, in bfloat16, in which the iteration computes.
    """
    first, third, fifth = coefficients
    # The products are smallest for wide matrices.
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if is_tall else matrices
    iterate = wide.reshape(-1, *wide.shape[-2:]).bfloat16()
    iterate = iterate / torch.linalg.matrix_norm(iterate, keepdim=True).clamp(min=eps)
    for _ in range(num_steps):
        gram = iterate @ iterate.mT
        powers = torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth)
        iterate = torch.baddbmm(iterate, powers, iterate, beta=first)
    orthogonal = iterate.view(wide.shape)
    return orthogonal.mT if is_tall else orthogonal


class MuonWithAdamW:
    """A factory of optimizers, for `optimizer_cls_and_kwargs` of a Trainer.

        hfdist.Trainer(..., optimizer_cls_and_kwargs=(hfdist.MuonWithAdamW, {"lr": 3e-4}))

    Muon steps the matrices of a model, and AdamW its vectors, embeddings and heads. Experts that are one tensor are a
    stack of matrices: each expert's matrix is stepped by itself, and a fused `gate_up_proj` is one matrix.
    """

    # transformers (`is_optimizer_factory`) takes only a class for a factory, and calls an instance of it.
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
            model: the whole model, or a rank's part of it.
            lr: learning rate of both; `adjust_lr_fn` makes Muon's steps about as long as AdamW's, so that one fits.
            weight_decay: weight decay of all matrices, also of those that AdamW steps.
            betas: AdamW's factors of the two running means.
            eps: what AdamW adds to the root of the squares.
            adjust_lr_fn: how Muon adjusts the rate to the shape of a matrix, as in `torch.optim.Muon`.
            of_muon: further arguments of `torch.optim.Muon`: momentum, nesterov, ns_coefficients, ns_steps.
        """
        parameters = _sort_parameters(model)
        adamw: list[Group] = [
            {"params": parameters.other_matrices, "weight_decay": weight_decay},
            {"params": parameters.vectors, "weight_decay": 0.0},
        ]
        # Muon's constructor counts dimensions, of which ZeRO-3's share of a matrix has one. So it is made with a
        # stand-in, and gets the matrices afterwards.
        muon = Muon([torch.zeros(1, 1)], lr=lr, weight_decay=weight_decay, adjust_lr_fn=adjust_lr_fn, **of_muon)
        muon.param_groups[0]["params"] = parameters.hidden_matrices
        return Joined([muon, torch.optim.AdamW(adamw, lr=lr, betas=betas, eps=eps)])


class _Parameters(NamedTuple):
    """The trained parameters of a model."""

    hidden_matrices: list[nn.Parameter]
    """Matrices and stacks of experts' matrices, without embeddings and heads: Muon steps them."""
    other_matrices: list[nn.Parameter]
    """All others with two dimensions or more, such as embeddings, heads and convolutions."""
    vectors: list[nn.Parameter]
    """Parameters of one dimension, and biases."""


def _sort_parameters(model: nn.Module) -> _Parameters:
    stacks, apart = set(map(id, stacks_of_experts(model))), embeddings_and_heads(model)
    found = _Parameters([], [], [])
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        # Under ZeRO-3, parameters are empty but for their share.
        num_dimensions = len(getattr(parameter, "ds_shape", parameter.shape))
        # Other parameters of three dimensions, such as convolutions, are no stacks.
        matrix_dimensions = 3 if id(parameter) in stacks else 2
        if num_dimensions < 2 or is_bias(name):
            found.vectors.append(parameter)
        elif num_dimensions == matrix_dimensions and id(parameter) not in apart:
            found.hidden_matrices.append(parameter)
        else:
            found.other_matrices.append(parameter)
    return found


def stacks_of_experts(model: nn.Module) -> Iterator[nn.Parameter]:
    """List the parameters with a dimension for the experts: transformers names the classes of such modules Experts."""
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            yield from module.parameters(recurse=False)


def is_bias(name: str) -> bool:
    """Whether a parameter of this name is a bias, which transformers' Trainer does not decay.

    The name decides, as the biases of all experts in one tensor have two dimensions.
    """
    return "bias" in name


def embeddings_and_heads(model: nn.Module) -> set[int]:
    """Give the ids of the parameters of all embeddings and of the head of any task: logits, labels, scores, values.

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
    if head is not None:
        apart |= {*map(id, head.parameters())}
    return apart
