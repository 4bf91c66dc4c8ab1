"""Before a pipeline reads images: do stages, of which the first alone reads them, train as the whole model?

Tried on a small model of the type, each of whose blocks is a stage. A later stage makes positions and masks from tokens
and from the sizes of images. Models whose later blocks need the features themselves do not train so: some of them add
features to the states after their first blocks, which NaN cannot tell, as nothing is missed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.errors import first_line
from hfdist.models.image_text import ImageBatch, read_images, small_reader
from hfdist.pipeline.split import run_in_turn, stages_of_one_block
from hfdist.pipeline.stage_io import CARRIES, Carry

_BOUND = 1e-4
"""Largest relative difference of the loss and of a gradient."""

_Gradients = dict[str, torch.Tensor]


def find_image_problem(architecture: PreTrainedConfig, batch: Mapping[str, torch.Tensor]) -> str | None:
    """Say why a type of model cannot be split where rows have images; None: it can. Needs no process group.

    Args:
        architecture: of the model.
        batch: what a forward takes, of a row with an image, and labels.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            small = small_reader(architecture)
            read_images(small, unreached=(), example=ImageBatch(batch))
            whole = _run(small, small(**batch).loss)
            problems = [_try(small, batch, carry, whole) for carry in CARRIES]
        except Exception as error:  # whatever a model raises that cannot be made small
            return f"it cannot be tried: {first_line(error)}"
    return None if None in problems else problems[0]


def _try(
    small: PreTrainedModel, batch: Mapping[str, torch.Tensor], carry: Carry, whole: tuple[float, _Gradients]
) -> str | None:
    try:
        stages = stages_of_one_block(small, carry)
        loss, gradients = _run(small, run_in_turn(stages, lambda model: model(**batch)).loss)
    except Exception as error:  # whatever a model raises whose blocks need more
        return first_line(error)
    if not abs(loss - whole[0]) <= _BOUND * abs(whole[0]):
        return f"its loss is {loss:.6g} and not {whole[0]:.6g}: blocks need more of an image than hidden states"
    least = 1e-3 * max(float(gradient.norm()) for gradient in whole[1].values())
    for name, wanted in whole[1].items():
        if name not in gradients or not (gradients[name] - wanted).norm() <= _BOUND * max(wanted.norm(), least):
            return f"the gradient of {name} is another"
    return None


def _run(model: PreTrainedModel, loss: torch.Tensor) -> tuple[float, _Gradients]:
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), gradients
