"""What each part of a model costs, for cutting it into stages of equal work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.pipeline.partitioning.partition import Costs
from hfdist.pipeline.stage_module import Block


def costs_by_parameters(model: PreTrainedModel, blocks: Sequence[Block]) -> Costs:
    """Parameters, for equal memory. A tied head counts where it runs, as its rank holds a copy."""
    return Costs(
        blocks=tuple(float(_numel(parameters_of(block))) for block in blocks),
        prologue=float(_numel(_weights(model.get_input_embeddings()))),
        epilogue=float(_numel(_weights(model.get_output_embeddings()))),
    )


def costs_by_flops(model: PreTrainedModel, blocks: Sequence[Block], sequence_length: int) -> Costs:
    """Operations of forward and backward for one token, for equal time: 6 for each parameter that multiplies.

    Attention adds 12 * heads * head size * tokens to a block that has it, experts count as often as a token chooses
    one, a lookup in the embedding counts nothing, and the head, which dominates small models with large
    vocabularies, counts in full together with its softmax.
    """
    text = model.config.get_text_config()
    attention = 12.0 * _attention_width(text) * sequence_length
    head = _numel(_weights(model.get_output_embeddings()))
    return Costs(
        blocks=tuple(
            6.0 * _active_parameters(block, text) + (attention if _has_attention(block) else 0.0) for block in blocks
        ),
        prologue=0.0,
        epilogue=6.0 * head + 10.0 * text.vocab_size,
    )


def parameters_of(block: Block) -> dict[str, nn.Parameter]:
    """The parameters of a block, by a name within it; shared ones once."""
    return {f"{part}.{name}": p for part, module in enumerate(block) for name, p in module.named_parameters()}


def _weights(module: nn.Module | None) -> dict[str, nn.Parameter]:
    return {} if module is None else dict(module.named_parameters())


def _numel(parameters: dict[str, nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters.values())


def _active_parameters(block: Block, text: PreTrainedConfig) -> float:
    """Those that one token meets: of the routed experts only the chosen ones."""
    num_experts = _first(text, ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"))
    num_chosen = _first(text, ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k"))
    share = num_chosen / num_experts if num_experts and num_chosen else 1.0
    parameters = parameters_of(block)
    routed = sum(p.numel() for name, p in parameters.items() if ".experts." in name)
    return _numel(parameters) - routed + share * routed


def _attention_width(text: PreTrainedConfig) -> int:
    num_heads = _first(text, ("num_attention_heads", "n_head", "num_heads"))
    head_size = _first(text, ("head_dim",))
    hidden_size = _first(text, ("hidden_size", "n_embd", "d_model"))
    return num_heads * head_size if head_size else hidden_size


def _has_attention(block: Block) -> bool:
    return any(
        "attn" in name.lower() or "attention" in name.lower() for part in block for name, _ in part.named_modules()
    )


def _first(config: PreTrainedConfig, names: Iterable[str]) -> int:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)
