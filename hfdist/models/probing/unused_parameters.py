"""Find out whether all parameters of a model take part in its loss, by asking a small model of the same class."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hfdist.models.loss.head import run_small, small_model


def uses_all_parameters(model: PreTrainedModel) -> bool:
    """Run a small model of the same class on a few tokens, here and alone: all ranks find the same.

    Returns:
        False also where it cannot be tried.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            small = small_model(model)
            run_small(small)
        except Exception:  # whatever a model raises that cannot be made small, or has another kind of loss
            return False
    return all(parameter.grad is not None for parameter in small.parameters() if parameter.requires_grad)
