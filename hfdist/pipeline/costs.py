"""What each part of a model costs, for a partition into stages of equal work: parameters, FLOPs or measured seconds."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.collectives import gather_json
from hfdist.errors import ConfigError
from hfdist.pipeline.stage_module import Block, Place, copy_structure, preserve_state

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
    attention = 12.0 * _attention_width(text) * sequence_length
    head = _numel(model.get_output_embeddings())
    return Costs(
        blocks=tuple(
            6.0 * _active_parameters(block, text) + (attention if _has_attention(block) else 0.0) for block in blocks
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
        half: type of autocast; None: none.

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

    def loss(there: nn.Module, inputs: Any) -> torch.Tensor:
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


def _active_parameters(block: Block, text: PreTrainedConfig) -> float:
    """Those that one token meets: of the routed experts only the chosen ones."""
    num_experts = _first(text, ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"))
    num_chosen = _first(text, ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k"))
    share = num_chosen / num_experts if num_experts and num_chosen else 1.0
    return sum(p.numel() * (share if ".experts." in name else 1) for name, p in parameters_of(block).items())


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


class _Timer:
    def __init__(self, device: torch.device, half: torch.dtype | None, num_blocks: int) -> None:
        self.seconds = [0.0] * num_blocks
        self.hidden = torch.empty(0)
        """Output of the last block, shape [sequences, tokens, hidden]."""
        self._device = device
        self._half = half
        self._known: dict[str, tuple[float, Any]] = {}

    def call(self, place: Place, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Stand in for a block: time it, or take the time and the output of another one of its kind."""
        kind = _kind(block)
        if kind not in self._known:
            self._known[kind] = self._measure(block, args, kwargs)
        seconds, output = self._known[kind]
        self.seconds[place.block] += seconds
        self.hidden = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        return output

    def time(self, module: nn.Module, prepare: Callable[[], Any], call: Callable[[nn.Module, Any], Any]) -> float:
        """Give the median seconds of forward and backward of a copy of `module` on the device.

        Args:
            module: on the host.
            prepare: gives the inputs on the device, anew each time; not timed.
            call: calls the copy with them.
        """
        # Small random weights: those of a model that is not loaded yet may be anything.
        memo: dict[int, Any] = {id(p): nn.Parameter(self._random_like(p)) for p in module.parameters()}
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

    def _measure(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, Any]:
        output: Any = None

        def prepare() -> Any:
            # Blocks may write into what they are given, such as a cache.
            return tree_map_only(torch.Tensor, self._move, copy.deepcopy((args, kwargs)))

        def call(there: nn.Module, inputs: Any) -> Any:
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


def _kind(block: nn.Module) -> str:
    """Equal for blocks that cost the same: same modules, same shapes, same plain settings."""
    settings = {name: value for name, value in vars(block).items() if isinstance(value, (str, bool))}
    shapes = [(name, tuple(parameter.shape)) for name, parameter in block.named_parameters()]
    return repr((type(block), sorted(settings.items()), shapes))
