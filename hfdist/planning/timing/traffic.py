"""Traffic of a rank along each axis in a step of any layout, by the sizes of the model and each Strategy's rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from hfdist.config.run import RunConfig
from hfdist.config.train import Precision, TrainConfig
from hfdist.errors import ConfigError
from hfdist.models.blocks import find_block_parts
from hfdist.models.embeddings import input_embeddings
from hfdist.models.encoders import takes_texts_apart
from hfdist.models.experts import is_of_experts, mixture_of, num_chosen_experts
from hfdist.models.flops import attention_width, flops_per_token, measure_size, num_trained
from hfdist.planning.costs import AxisTraffic
from hfdist.planning.row_sizes import row_sizes
from hfdist.strategies.base import Strategy
from hfdist.strategies.tensor.linear import GATHERED, LOOKED_UP, split_dimensions
from hfdist.strategies.tensor.plan import TensorPlan, first_plan
from hfdist.strategies.traffic import FrozenSizes, StepSizes, TensorSizes

_LARGEST_SMALL = 100_000
"""Most elements of a small parameter, which ZeRO-3 does not partition: `stage3_param_persistence_threshold`."""


def traffic(strategy: Strategy, sizes: StepSizes, *, devices_per_machine: int) -> tuple[AxisTraffic, ...]:
    """Give what one rank sends in a step, the axis that sends most first.

    Pure arithmetic: a search may call it thousands of times. `sizes` come from `step_sizes`, once a tensor degree.

    Args:
        strategy: strategy of the layout; neither started nor partitioned.
        sizes: sizes of the whole model.
        devices_per_machine: ranks that share a machine, neighbours first.
    """
    return tuple(
        AxisTraffic(
            axis=sent.axis,
            sent_bytes=sent.num_bytes,
            calls=max(1, round(sent.calls)),
            size=sent.size,
            crosses_machines=sent.size * sent.stride > devices_per_machine,
            machine_ranks=min(sent.size, max(1, devices_per_machine // sent.stride)),
            overlaps=sent.hidden_by,
            kind=sent.kind,
            microbatches=sent.microbatches,
        )
        for sent in sorted(strategy.traffic(sizes), key=lambda sent: -sent.num_bytes)
    )


def step_sizes(
    model: PreTrainedModel,
    train: TrainConfig,
    *,
    tensor: int = 1,
    is_gpu: bool = True,
    plan: TensorPlan | None = None,
    stepped_whole: tuple[int, ...] = (),
    frozen: FrozenSizes | None = None,
) -> StepSizes:
    """Measure a model for `traffic`.

    Args:
        model: the whole model, on any device, also `meta`.
        train: precision, and whether blocks are computed again.
        tensor: `strategy.tensor`.
        is_gpu: whether ranks will have GPUs.
        plan: plan of the tensor ranks; None: the first that fits.
        stepped_whole: see `optim.registry.stepped_whole`.
        frozen: the sizes of another model beside it, which does not train.

    Raises:
        ConfigError: the model cannot be divided over so many tensor ranks.
    """
    config = model.config.get_text_config(decoder=True)
    parameters = dict(model.named_parameters())
    total = sum(p.numel() for p in parameters.values())
    blocks = list(_blocks(model))
    experts = {name: p.numel() for name, p in parameters.items() if is_of_experts(name)}
    ends = input_embeddings(model), model.get_output_embeddings()
    embedding, head = (getattr(module, "weight", None) for module in ends)
    num_heads = getattr(config, "num_attention_heads", None) or 1
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    num_keys = getattr(config, "num_key_value_heads", None) or num_heads
    half = train.precision is not Precision.fp32
    weight = next(iter(parameters.values()))
    return StepSizes(
        parameters=total,
        blocks=sum(p.numel() for block in blocks for p in block.parameters()),
        num_blocks=len(blocks),
        hidden=config.hidden_size,
        queries=attention_width(config) or config.hidden_size,
        keys=num_keys * head_size,
        head_size=head_size,
        embedding=0 if embedding is None else embedding.numel(),
        is_tied=embedding is not None and embedding is head,
        trained_share=num_trained(model) / total,
        small=sum(p.numel() for p in parameters.values() if p.numel() <= _LARGEST_SMALL),
        experts=sum(experts.values()),
        num_expert_blocks=len(set(map(mixture_of, experts))),
        chosen_experts=num_chosen_experts(config),
        tensor=TensorSizes() if tensor == 1 else _sizes_of_plan(model, plan or first_plan(model, tensor), tensor),
        weight_bytes=weight.element_size(),
        compute_bytes=min(2, weight.element_size()) if half else weight.element_size(),
        recomputes=train.gradient_checkpointing,
        is_gpu=is_gpu,
        stepped_whole=stepped_whole,
        frozen=frozen,
    )


def of_task(sizes: StepSizes, config: RunConfig, model: PreTrainedModel) -> StepSizes:
    """Add what the task of a run changes: what the model reads of a sequence, and texts that are compared."""
    head = config.task.name.traits.head
    rows = row_sizes(config, is_apart=takes_texts_apart(model, head))
    embeddings = rows.texts * config.train.global_batch_size * sizes.hidden
    return replace(sizes, sequence_tokens=rows.num_tokens, embeddings=embeddings)


def sequence_flops(model: PreTrainedModel, config: RunConfig) -> float:
    """Give the FLOPs of a sequence, as MFU counts them: what a step reads twice counts once."""
    rows = row_sizes(config, is_apart=takes_texts_apart(model, config.task.name.traits.head))
    a_token = flops_per_token(model.config, measure_size(model), rows.tokens, rows.targets)
    return a_token * rows.num_tokens


def _blocks(model: PreTrainedModel) -> Iterable[nn.Module]:
    try:
        return [part for parts in find_block_parts(model) for part in parts]
    except ConfigError:
        return []


def _sizes_of_plan(model: PreTrainedModel, plan: TensorPlan, num_ranks: int) -> TensorSizes:
    """Add up the elements that the layers of a plan divide and exchange."""
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    of_parents: dict[str, list[str]] = defaultdict(list)
    divided: dict[int, int] = {}
    for name, style in plan.layers.items():
        of_parents[name.removesuffix(".base_layer").rpartition(".")[0]].append(name)
        for own in split_dimensions(modules[name], style):
            divided[id(getattr(modules[name], own))] = getattr(modules[name], own).numel()
    mixtures = {mixture_of(name) for name in plan.rules if ".experts" in name}
    for name, parameter in parameters.items():
        if is_of_experts(name) and mixture_of(name) in mixtures:
            divided[id(parameter)] = parameter.numel()
    summed = gathered = read = calls = 0
    head = model.get_output_embeddings()
    for names in of_parents.values():
        for place, name in enumerate(names):
            module, style = modules[name], plan.layers[name]
            if style == LOOKED_UP or module is head:
                continue
            width_in, width_out = _widths(module)
            if style == "rowwise":
                summed, calls = summed + width_out, calls + 1
                continue
            if style == GATHERED:
                gathered, calls = gathered + num_ranks * -(-width_out // num_ranks), calls + 1
            # Layers that read one tensor add up its gradient once. In a module with several layers the last one reads
            # what the others have made.
            is_last = style == GATHERED and place == len(names) - 1 > 0
            read += width_in if place == 0 or is_last else 0
    hidden = model.config.get_text_config(decoder=True).hidden_size
    return TensorSizes(
        divided=sum(divided.values()),
        embedded=hidden if LOOKED_UP in plan.layers.values() else 0,
        summed=summed + len(mixtures) * hidden,
        gathered=gathered,
        summed_backward=read + len(mixtures) * hidden,
        calls=calls + len(mixtures),
    )


def _widths(module: nn.Module) -> tuple[int, int]:
    """Give the widths of a linear layer's input and output; Conv1D has them the other way round."""
    rows, columns = module.weight.shape  # type: ignore[misc]
    return (columns, rows) if isinstance(module, nn.Linear) else (rows, columns)
