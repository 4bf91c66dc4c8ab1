"""Checks that the loss over routers, as it is computed for a global batch, is the loss that the model itself adds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hfdist.errors import ConfigError, first_line
from hfdist.models.embeddings import has_no_head
from hfdist.models.probing import small_model
from hfdist.models.routers import ROUTER_FLAG, Routers, RoutingSums, balancing_loss, base_of

_TOLERANCE = 1e-5
"""Largest relative difference of the two losses over routers."""


def check_router_loss(model: nn.Module) -> None:
    """Compare the loss over routers with the model's own, on a small model of its class. All ranks find the same.

    Raises:
        ConfigError: the two losses differ, or no small model can be tried.
    """
    reason = _difference(base_of(model))
    if reason is not None:
        raise ConfigError(
            "the loss over this model's routers is not known for a global batch, so it would depend on the layout",
            where=f"model.config.{ROUTER_FLAG}",
            found=f"{type(base_of(model)).__name__}: {reason}",
            allowed="false",
            hint=f"model.config.{ROUTER_FLAG}=false",
        )


def _difference(model: Any) -> str | None:
    """Say how the loss over routers differs from that of a small model of this class; None: it does not."""
    if has_no_head(model):
        return "it has no head, and only a class with a head adds this loss to its own"
    with torch.random.fork_rng(devices=[]):
        try:
            small = small_model(model)
            routers = Routers(small)
            generator = torch.Generator().manual_seed(0)
            tokens = torch.randint(min(small.config.get_text_config().vocab_size, 100), (2, 16), generator=generator)
            mask = torch.ones_like(tokens)
            mask[1, 11:] = 0
            batch = {"input_ids": tokens, "labels": tokens, "attention_mask": mask, "use_cache": False}
            with torch.no_grad():
                routers.is_watching = True
                token_loss = small(**batch, **{ROUTER_FLAG: False}).loss
                routings = routers.take()
                with_routers = small(**batch, **{ROUTER_FLAG: True})
            loss = balancing_loss(model)
            if not routings:
                return "its routers give no row of logits for each token"
            if getattr(with_routers, "aux_loss", None) is None:
                return "it adds none"
            num_experts = routings[0].logits.shape[-1]
            totals = RoutingSums.of(torch.zeros(routers.num_layers + 2, num_experts, dtype=torch.float64))
            loss.count(routings, mask, totals)
            weights = loss.weights(totals)
            ours = loss.share(routings, mask, weights)
        except Exception as error:  # whatever a model raises that cannot be made small, or has other routers
            return f"it cannot be tried: {first_line(error)}"
    theirs = loss.coefficient * with_routers.aux_loss
    if not torch.allclose(ours, theirs, rtol=_TOLERANCE, atol=0.0):
        return f"of a small model it is {float(theirs):.6f}, and by the common definition {float(ours):.6f}"
    # Tighter, since the loss of tokens is larger than that over routers.
    if not torch.allclose(token_loss + ours, with_routers.loss, rtol=_TOLERANCE / 10, atol=0.0):
        return f"the model adds {float(with_routers.loss - token_loss):.6f}, and not {float(ours):.6f}"
    return None
