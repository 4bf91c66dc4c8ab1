"""What each part of a model costs a stage: parameters, or floating-point operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from hfdist.models.embeddings import input_embeddings
from hfdist.models.experts import first_number, num_active
from hfdist.models.flops import HIDDEN_SIZES, attention_width
from hfdist.models.image_text import PROJECTOR, TOWER, names_of_parts, reads_images
from hfdist.pipeline.stage_module import Block

_FLOPS_OF_WEIGHT = 6.0
"""For one token: a product and a sum in the forward, and as many for each of the backward's two gradients."""
_FLOPS_OF_SCORE = 2 * _FLOPS_OF_WEIGHT
"""For one token, of each number of its queries with each other token: in the scores, and in the sum of values."""
_FLOPS_OF_LOGIT = 10.0
"""For one token, of each logit: the softmax and its gradient."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What each part of a model costs, in any common unit (parameters, FLOPs, seconds)."""

    blocks: tuple[float, ...]
    prologue: float
    """What runs before the first block: the embedding, and what reads images in a run whose rows have some."""
    epilogue: float
    """What runs after the last block: the head and its loss; a final norm is too small to count."""

    def of_blocks(self, run: range) -> float:
        """Give what a stage of these blocks costs, with what comes before the first and after the last block."""
        ends = self.prologue * (run.start == 0) + self.epilogue * (run.stop == len(self.blocks))
        return sum(self.blocks[run.start : run.stop]) + ends


def costs_by_parameters(model: PreTrainedModel, blocks: Sequence[Block]) -> Costs:
    """Give the numbers of parameters, for equal memory. A tied head counts where it runs, as its rank holds a copy."""
    return Costs(
        blocks=tuple(float(sum(p.numel() for p in parameters_of(block).values())) for block in blocks),
        prologue=float(_numel(input_embeddings(model)) + num_image_parameters(model)),
        epilogue=float(_numel(model.get_output_embeddings())),
    )


def costs_by_flops(model: PreTrainedModel, blocks: Sequence[Block], sequence_length: int) -> Costs:
    """Give the floating-point operations of forward and backward for one token, for equal time.

    Experts count as often as a token chooses one. A lookup in the embedding counts nothing. The head dominates small
    models with large vocabularies. What reads images counts as if each token were a patch.
    """
    text = model.config.get_text_config()
    # A config may give no number of heads, or none for all blocks.
    width = attention_width(text) or first_number(text, HIDDEN_SIZES)
    attention = _FLOPS_OF_SCORE * width * sequence_length
    head = _numel(model.get_output_embeddings())
    return Costs(
        blocks=tuple(
            _FLOPS_OF_WEIGHT * num_active(parameters_of(block).items(), text)
            + (attention if _has_attention(block) else 0.0)
            for block in blocks
        ),
        prologue=_FLOPS_OF_WEIGHT * num_image_parameters(model),
        epilogue=_FLOPS_OF_WEIGHT * head + _FLOPS_OF_LOGIT * text.vocab_size,
    )


def num_image_parameters(model: PreTrainedModel) -> int:
    """Count the parameters of tower and projector; 0 in a run without images, which never runs them."""
    if not reads_images(model):
        return 0
    parts = names_of_parts(model)
    return sum(model.get_parameter(name).numel() for name in (*parts[TOWER], *parts[PROJECTOR]))


def parameters_of(block: Block) -> dict[str, nn.Parameter]:
    """Give the parameters of a block by their names in it; a part has each of its own once."""
    return {f"{part}.{name}": p for part, module in enumerate(block) for name, p in module.named_parameters()}


def kind_of_block(block: Block) -> str:
    """Give a text that is equal for blocks that cost the same: same modules, same shapes, same plain settings."""
    modules = [
        (
            name,
            type(module),
            sorted((key, value) for key, value in vars(module).items() if isinstance(value, (str, bool))),
        )
        for part in block
        for name, module in part.named_modules()
    ]
    shapes = [(name, tuple(p.shape), p.requires_grad) for part in block for name, p in part.named_parameters()]
    return repr((modules, shapes))


def _numel(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())


def _has_attention(block: Block) -> bool:
    return any(
        "attn" in name.lower() or "attention" in name.lower() for part in block for name, _ in part.named_modules()
    )
