"""Several optimizers stepped as one, and one that is made so: Muon for matrices, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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


class MuonWithAdamW:
    """Makes the optimizer of a model, as `optimizer_cls_and_kwargs` of a Trainer wants it.

        hfdist.Trainer(..., optimizer_cls_and_kwargs=(hfdist.MuonWithAdamW, {"lr": 3e-4}))

    Muon steps the parameters of two dimensions, but for embeddings and the head, which AdamW steps like vectors.
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
        looked_up = embeddings_and_head(model)
        # Under ZeRO-3, parameters are empty but for their share.
        num_dimensions = {id(p): len(getattr(p, "ds_shape", p.shape)) for p in trained}
        matrices = [p for p in trained if num_dimensions[id(p)] == 2 and id(p) not in looked_up]
        others = [p for p in trained if num_dimensions[id(p)] != 2 or id(p) in looked_up]
        adamw: list[Group] = [
            {"params": [p for p in others if num_dimensions[id(p)] >= 2], "weight_decay": weight_decay},
            {"params": [p for p in others if num_dimensions[id(p)] < 2], "weight_decay": 0.0},
        ]
        # Muon's constructor counts dimensions, which a share of a matrix has not. So it gets the matrices after it.
        muon = torch.optim.Muon(
            [torch.zeros(1, 1)], lr=lr, weight_decay=weight_decay, adjust_lr_fn=adjust_lr_fn, **of_muon
        )
        muon.param_groups[0]["params"] = matrices
        return Joined([muon, torch.optim.AdamW(adamw, lr=lr, betas=betas, eps=eps)])


def embeddings_and_head(model: nn.Module) -> set[int]:
    """Give the ids of the parameters of all embeddings, and of the head that gives logits, where there is one."""
    modules: list[nn.Module | None] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if hasattr(model, "get_output_embeddings"):
        head: Any = model.get_output_embeddings
        modules.append(head())
    return {id(parameter) for module in modules if module is not None for parameter in module.parameters()}
