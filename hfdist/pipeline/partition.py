"""Which blocks each stage runs: runs of blocks whose costs are shared evenly, or the user's own numbers.

The cost of a part of a model is its parameters, its FLOPs or measured seconds. The most loaded rank sets the pace of a
pipeline, so its load is made as small as possible. With one stage a rank this is the linear partition problem, which
dynamic programming solves exactly. With several stages a rank it contains number partitioning, which is NP-hard: the
stages are first made even, and then blocks move from stage to stage for as long as that helps.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from hfdist.collectives import gather_json
from hfdist.config.batch import BatchPlan
from hfdist.config.strategy import Balance, StrategyConfig
from hfdist.config.train import Precision
from hfdist.errors import ConfigError, PartitionError
from hfdist.models.experts import first_number, num_active
from hfdist.models.flops import HIDDEN_SIZES, attention_width
from hfdist.pipeline.stage_module import Block, BlockPlace, copy_structure, preserve_state

logger = logging.getLogger(__name__)

_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What each part of a model costs, in any common unit (parameters, FLOPs, seconds)."""

    blocks: tuple[float, ...]
    prologue: float
    """What runs before the first block: the embedding."""
    epilogue: float
    """What runs after the last block: final norm, head and loss."""


def costs_by_parameters(model: PreTrainedModel, blocks: Sequence[Block]) -> Costs:
    """Parameters, for equal memory. A tied head counts where it runs, as its rank holds a copy."""
    return Costs(
        blocks=tuple(float(sum(p.numel() for p in parameters_of(block).values())) for block in blocks),
        prologue=float(_numel(model.get_input_embeddings())),
        epilogue=float(_numel(model.get_output_embeddings())),
    )


def costs_by_flops(model: PreTrainedModel, blocks: Sequence[Block], sequence_length: int) -> Costs:
    """Operations of forward and backward for one token, for equal time: 6 for each parameter that multiplies.

    Attention adds 12 * heads * head size * tokens to a block that has it, experts count as often as a token chooses
    one, a lookup in the embedding counts nothing, and the head, which dominates small models with large
    vocabularies, counts in full together with its softmax.
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
        prologue=0.0,
        epilogue=6.0 * head + 10.0 * text.vocab_size,
    )


def costs_by_time(
    model: PreTrainedModel,
    blocks: Sequence[Block],
    tokens: torch.Tensor,
    device: torch.device,
    half: torch.dtype | None,
) -> Costs:
    """Seconds of forward and backward of one micro batch on the real device.

    The model's own forward runs once on the host with a stand-in for each block. The first block of each kind is copied
    to the device there, with the very arguments that the model gives it, and timed; others of its kind cost the same.

    Args:
        model: whole, on the host; only the shapes of its weights are used.
        blocks: its blocks.
        tokens: one micro batch of token ids, shape [sequences, tokens].
        device: where the model will train.
        half: type of autocast, if any.

    Raises:
        ConfigError: blocks that share states with others.
    """
    timer = _Timer(device, half, len(blocks))
    try:
        with torch.no_grad(), preserve_state(model):
            copy_structure(model, blocks, timer.call)(input_ids=tokens)
    except Exception as error:
        raise ConfigError(
            "the model's blocks cannot be timed one by one: they need what other blocks have left",
            where="strategy.balance",
            found=f"measured, {type(error).__name__}: {error}",
            allowed="flops, parameters",
            hint="strategy.balance=flops",
        ) from error
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ids, hidden = tokens.to(device), timer.hidden.to(device)

    def loss(there: nn.Module, inputs: object) -> torch.Tensor:
        return nn.functional.cross_entropy(there(hidden).float().flatten(0, -2), ids.flatten())

    return Costs(
        blocks=tuple(timer.seconds),
        prologue=0.0 if embedding is None else timer.time(embedding, lambda: None, lambda there, _: there(ids)),
        epilogue=0.0 if head is None else timer.time(head, lambda: None, loss),
    )


def mean_costs_by_time(
    model: PreTrainedModel, blocks: Sequence[Block], tokens: torch.Tensor, half: torch.dtype | None
) -> Costs:
    """Give the mean over all ranks of `costs_by_time`, so that all ranks find the same stages. A collective."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    own = costs_by_time(model, blocks, tokens, device, half)
    logger.info("measured: blocks %s s, embedding %.3g s, head and loss %.3g s", own.blocks, own.prologue, own.epilogue)
    every = gather_json([*own.blocks, own.prologue, own.epilogue])
    *seconds, prologue, epilogue = (fmean(times) for times in zip(*every, strict=True))
    # Differences below a hundredth of a block are noise, which must not decide between partitions.
    grain = fmean(seconds) / 100
    return Costs(blocks=tuple(round(time / grain) * grain for time in seconds), prologue=prologue, epilogue=epilogue)


def parameters_of(block: Block) -> dict[str, nn.Parameter]:
    """The parameters of a block, by a name within it; shared ones once."""
    return {f"{part}.{name}": p for part, module in enumerate(block) for name, p in module.named_parameters()}


def _numel(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())


def _has_attention(block: Block) -> bool:
    return any(
        "attn" in name.lower() or "attention" in name.lower() for part in block for name, _ in part.named_modules()
    )


Inputs = TypeVar("Inputs")


class _Timer:
    def __init__(self, device: torch.device, half: torch.dtype | None, num_blocks: int) -> None:
        self.seconds = [0.0] * num_blocks
        self.hidden = torch.empty(0)
        """Output of the last block, shape [sequences, tokens, hidden]."""
        self._device = device
        self._half = half
        self._known: dict[str, tuple[float, object]] = {}

    def call(self, place: BlockPlace, block: nn.Module, *args: object, **kwargs: object) -> object:
        """Stand in for a block: time it, or take the time and the output of another one of its kind."""
        kind = kind_of_block(block)
        if kind not in self._known:
            self._known[kind] = self._measure(block, args, kwargs)
        seconds, output = self._known[kind]
        self.seconds[place.block] += seconds
        self.hidden = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        return output

    def time(
        self, module: nn.Module, prepare: Callable[[], Inputs], call: Callable[[nn.Module, Inputs], object]
    ) -> float:
        """Give the median seconds of forward and backward of a copy of `module` on the device.

        Args:
            module: on the host.
            prepare: gives the inputs on the device, anew each time; not timed.
            call: calls the copy with them.
        """
        # Small random weights: those of a model that is not loaded yet may be anything.
        memo: dict[int, object] = {id(p): nn.Parameter(self._random_like(p)) for p in module.parameters()}
        there = copy.deepcopy(module, memo).to(self._device)
        seconds = []
        for _ in range(1 + _REPEATS):
            inputs = prepare()
            self._synchronize()
            start = time.perf_counter()
            with torch.enable_grad(), torch.autocast(self._device.type, self._half, enabled=self._half is not None):
                values = tree_leaves(call(there, inputs))
            outputs = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
            self._synchronize()
            seconds.append(time.perf_counter() - start)
        return median(seconds[1:])

    def _measure(
        self, block: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[float, object]:
        output: object = None

        def prepare() -> tuple[tuple[object, ...], Mapping[str, object]]:
            # Blocks may write into what they are given, such as a cache.
            moved: tuple[tuple[object, ...], Mapping[str, object]] = tree_map_only(
                torch.Tensor, self._move, copy.deepcopy((args, kwargs))
            )
            return moved

        def call(there: nn.Module, inputs: tuple[tuple[object, ...], Mapping[str, object]]) -> object:
            nonlocal output
            output = there(*inputs[0], **inputs[1])
            return output

        seconds = self.time(block, prepare, call)
        return seconds, tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), output)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self._device).requires_grad_(tensor.is_floating_point())

    def _random_like(self, parameter: torch.Tensor) -> torch.Tensor:
        return torch.randn(parameter.shape, dtype=parameter.dtype, device=self._device) * 0.02

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def kind_of_block(block: nn.Module) -> str:
    """Equal for blocks that cost the same: same modules, same shapes, same plain settings."""
    settings = {name: value for name, value in vars(block).items() if isinstance(value, (str, bool))}
    shapes = [(name, tuple(parameter.shape)) for name, parameter in block.named_parameters()]
    return repr((type(block), sorted(settings.items()), shapes))


_RESOLUTION = 2**29
"""Costs become integers with about this sum: sums are exact, so all processes find the same, and squares fit int64."""

_Ints = npt.NDArray[np.int64]


def choose_stages(
    model: PreTrainedModel,
    blocks: Sequence[Block],
    strategy: StrategyConfig,
    batch: BatchPlan,
    rank_of_stage: tuple[int, ...],
    precision: Precision,
) -> tuple[range, ...]:
    """Give the blocks of each stage, as `strategy.balance` and `strategy.blocks_per_stage` ask; equal on all ranks.

    Raises:
        PartitionError: fewer blocks than stages.
        ConfigError: `strategy.blocks_per_stage` does not fit the model.
    """
    if strategy.blocks_per_stage is not None:
        return explicit(strategy.blocks_per_stage, len(blocks), len(rank_of_stage))
    match strategy.balance:
        case Balance.parameters:
            costs = costs_by_parameters(model, blocks)
        case Balance.flops:
            costs = costs_by_flops(model, blocks, batch.sequence_length)
        case Balance.measured:
            half = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}.get(precision)
            tokens = torch.zeros(batch.micro_batch_size, batch.sequence_length, dtype=torch.int64)
            costs = mean_costs_by_time(model, blocks, tokens, half)
    return partition(costs, rank_of_stage)


def partition(costs: Costs, rank_of_stage: tuple[int, ...]) -> tuple[range, ...]:
    """Give one run of blocks for each stage, none of them empty. Equal arguments give equal runs in every process.

    The prologue belongs to the first stage, the epilogue to the last.

    Raises:
        PartitionError: fewer blocks than stages.
    """
    num_stages = len(rank_of_stage)
    _check_enough_blocks(len(costs.blocks), num_stages)
    unit = (sum(costs.blocks) + costs.prologue + costs.epilogue) / _RESOLUTION or 1.0
    prefix = list(accumulate((round(cost / unit) for cost in costs.blocks), initial=0))
    extra = [0] * num_stages
    extra[0] += round(costs.prologue / unit)
    extra[-1] += round(costs.epilogue / unit)
    bounds = _even_stages(prefix, extra)
    if len(set(rank_of_stage)) < num_stages:
        bounds = _even_ranks(np.array(bounds), np.array(prefix), np.array(extra), rank_of_stage)
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def explicit(counts: Sequence[int], num_blocks: int, num_stages: int) -> tuple[range, ...]:
    """Take the user's own number of blocks for each stage.

    Raises:
        PartitionError: fewer blocks than stages.
        ConfigError: the wrong number of stages, an empty one, or not all blocks.
    """
    _check_enough_blocks(num_blocks, num_stages)
    fits = [num_blocks // num_stages + (stage < num_blocks % num_stages) for stage in range(num_stages)]
    if len(counts) != num_stages:
        wrong = f"one number of blocks is needed for each of the {num_stages} stages"
    elif min(counts) < 1:
        wrong = "every stage needs a block at least"
    elif sum(counts) != num_blocks:
        wrong = f"the stages together must hold the {num_blocks} blocks of the model"
    else:
        return tuple(range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0)))
    raise ConfigError(
        wrong,
        where="strategy.blocks_per_stage",
        found=f"{list(counts)}: {len(counts)} stages, {sum(counts)} blocks",
        allowed=f"{num_stages} numbers >= 1 with the sum {num_blocks}",
        hint=f"strategy.blocks_per_stage={fits}".replace(" ", "") + ", or leave it out to split by cost",
    )


def _check_enough_blocks(num_blocks: int, num_stages: int) -> None:
    if num_blocks < num_stages:
        # One that the ranks divide by.
        fits = next(number for number in range(num_blocks, 0, -1) if num_stages % number == 0)
        raise PartitionError(
            "the model has fewer blocks than the pipeline has stages",
            where="strategy.pipeline, strategy.stages_per_rank",
            found=f"{num_blocks} blocks for {num_stages} stages",
            allowed=f"at most {num_blocks} stages (strategy.pipeline x strategy.stages_per_rank)",
            hint=f"strategy.pipeline={fits} strategy.stages_per_rank=1 strategy.schedule=1f1b, or a deeper model",
        )


def _even_stages(prefix: Sequence[int], extra: Sequence[int]) -> tuple[int, ...]:
    """Give the first block of each stage, and the end, so that the most loaded stage is as small as possible."""
    num_blocks, num_stages = len(prefix) - 1, len(extra)
    # By first block: largest stage, sum of squares (of equally good ones the more even) and bounds of the later stages.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {num_blocks: (0, 0, (num_blocks,))}
    for stage in reversed(range(num_stages)):
        longer = {}
        for start in range(stage, num_blocks - (num_stages - stage) + 1):
            found = None
            for stop in range(start + 1, num_blocks + 1):
                cost = prefix[stop] - prefix[start] + extra[stage]
                if found is not None and cost > found[0]:
                    break
                if stop in best:
                    largest, squares, bounds = best[stop]
                    option = (max(largest, cost), squares + cost * cost, (start, *bounds))
                    found = option if found is None else min(found, option)
            if found is not None:
                longer[start] = found
        best = longer
    return best[0][2]


def _even_ranks(bounds: _Ints, prefix: _Ints, extra: _Ints, rank_of_stage: tuple[int, ...]) -> tuple[int, ...]:
    """Improve bounds for as long as moving a block from one stage to another, and shifting one bound more, helps."""
    num_stages = len(rank_of_stage)
    runs_on = np.eye(max(rank_of_stage) + 1, dtype=np.int64)[list(rank_of_stage)]
    # A move by the bounds i to j - 1: stage i - 1 gets a block, stage j - 1 loses one, those between keep their number.
    #
    #   bounds 0 2 4 6 8     a b | c d | e f | g h
    #   i = 1, j = 3         a b c | d e | f | g h
    bound = np.arange(num_stages + 1)
    pairs = [(i, j) for i in range(1, num_stages) for j in range(i + 1, num_stages + 1)]
    ranges = np.array([(bound >= i) & (bound < j) for i, j in pairs], dtype=np.int64)
    moves = np.concatenate([ranges, -ranges])
    one = np.eye(num_stages + 1, dtype=np.int64)[1:-1]
    shifts = np.concatenate([0 * one[:1], one, -one])

    def rate(options: _Ints) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Give the best of several bounds, by the loads of ranks and then by those of stages."""
        options = options[(np.diff(options) > 0).all(axis=1)]
        if not len(options):
            return []
        stages = np.diff(prefix[options]) + extra
        ranks = stages @ runs_on
        keys = (ranks.max(1), (ranks**2).sum(1), stages.max(1), (stages**2).sum(1))
        first = np.lexsort(keys[::-1])[0]
        return [(tuple(int(key[first]) for key in keys), tuple(options[first].tolist()))]

    best = rate(bounds[None])[0]
    while True:
        found = min(option for shift in shifts for option in [best, *rate(np.array(best[1]) + shift + moves)])
        if found[0] == best[0]:
            return best[1]
        best = found
