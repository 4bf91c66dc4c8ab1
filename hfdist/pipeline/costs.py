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


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What each part of a model costs, in any common unit (parameters, FLOPs, seconds)."""

    blocks: tuple[float, ...]
    prologue: float
    """What runs before the first block: the embedding, and what reads images in a run whose rows have some."""
    epilogue: float
    """What runs after the last block: final norm, head and loss."""

    def of_blocks(self, run: range) -> float:
        """Give what a stage of these blocks costs, with what comes before the first and after the last block."""
        ends = self.prologue * (run.start == 0) + self.epilogue * (run.stop == len(self.blocks))
        return sum(self.blocks[run.start : run.stop]) + ends


def costs_by_parameters(model: PreTrainedModel, blocks: Sequence[Block]) -> Costs:
    """Parameters, for equal memory. A tied head counts where it runs, as its rank holds a copy."""
    return Costs(
        blocks=tuple(float(sum(p.numel() for p in parameters_of(block).values())) for block in blocks),
        prologue=float(_numel(input_embeddings(model)) + count_of_images(model)),
        epilogue=float(_numel(model.get_output_embeddings())),
    )


def costs_by_flops(model: PreTrainedModel, blocks: Sequence[Block], sequence_length: int) -> Costs:
    """Operations of forward and backward for one token, for equal time: 6 for each parameter that multiplies.

    Attention adds 12 * heads * head size * tokens to a block that has it, experts count as often as a token chooses
    one, a lookup in the embedding counts nothing, and the head, which dominates small models with large
    vocabularies, counts in full together with its softmax. What reads images counts as if each token were a patch.
    """
    text = model.config.get_text_config()
    # A config may give no number of heads, or none for all blocks.
    attention = 12.0 * (attention_width(text) or first_number(text, HIDDEN_SIZES)) * sequence_length
    head = _numel(model.get_output_embeddings())
    return Costs(
        blocks=tuple(
            6.0 * num_active(parameters_of(block).items(), text) + (attention if _has_attention(block) else 0.0)
            for block in blocks
        ),
        prologue=6.0 * count_of_images(model),
        epilogue=6.0 * head + 10.0 * text.vocab_size,
    )


def count_of_images(model: PreTrainedModel) -> int:
    """Count the parameters of tower and projector; 0 in a run without images, which never runs them."""
    if not reads_images(model):
        return 0
    parts = names_of_parts(model)
    return sum(model.get_parameter(name).numel() for name in (*parts[TOWER], *parts[PROJECTOR]))


def parameters_of(block: Block) -> dict[str, nn.Parameter]:
    """The parameters of a block, by a name within it; shared ones once."""
    return {f"{part}.{name}": p for part, module in enumerate(block) for name, p in module.named_parameters()}


def _numel(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())


def _has_attention(block: Block) -> bool:
    return any(
        "attn" in name.lower() or "attention" in name.lower() for part in block for name, _ in part.named_modules()
    )
