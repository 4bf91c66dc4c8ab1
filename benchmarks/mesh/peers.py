"""The same Llama in a bare loop, shared by torch's calls or by accelerate, without what a Trainer does besides."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from benchmarks.pipeline_llama import NUM_MICROBATCHES, NUM_WARMUP_STEPS, SEQUENCE_TOKENS, Cost

_PLAN = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ColwiseParallel),
    **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel),
}
_MAX_NORM = 1.0
_ACCELERATE_SIZES = {"fsdp2": "dp_shard_size", "tensor": "tp_size", "context": "cp_size"}


class Shared(NamedTuple):
    """A model that ranks share, and what its library does for the loop."""

    model: nn.Module
    optimizer: Any
    backward: Callable[[torch.Tensor], None]
    clip: Callable[[], Any]
    accumulating: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around each micro batch of a step but the last."""
    splitting: Callable[[list[torch.Tensor]], AbstractContextManager[Any]] = lambda _: nullcontext()
    """Around a micro batch, of which it leaves in these tensors what this rank computes."""


def train(library: str, layout: str, num_steps: int, sizes: dict[str, Any]) -> list[Cost]:
    """Train for some steps on one rank; what each took but the first ones."""
    torch.manual_seed(0)
    shared = _SHARE[library](layout, sizes)
    shares_batch = layout == "fsdp2"
    num_ranks = dist.get_world_size()
    num_microbatches = NUM_MICROBATCHES // num_ranks if shares_batch else NUM_MICROBATCHES
    readings = [Cost(perf_counter(), process_time())]
    for _ in range(NUM_WARMUP_STEPS + num_steps):
        tokens = torch.randint(sizes["vocab_size"], (NUM_MICROBATCHES, 1, SEQUENCE_TOKENS))
        own = tokens[dist.get_rank() :: num_ranks] if shares_batch else tokens
        for number, micro_batch in enumerate(own, start=1):
            with shared.accumulating() if number < len(own) else nullcontext():
                _forward_backward(shared, micro_batch, num_microbatches)
        shared.clip()
        shared.optimizer.step()
        shared.optimizer.zero_grad()
        readings.append(Cost(perf_counter(), process_time()))
    return [
        Cost(after.wall_seconds - before.wall_seconds, after.cpu_seconds - before.cpu_seconds)
        for before, after in pairwise(readings[NUM_WARMUP_STEPS:])
    ]


def _forward_backward(shared: Shared, tokens: torch.Tensor, num_microbatches: int) -> None:
    labels, positions = tokens.roll(-1, dims=1), torch.arange(tokens.shape[1])[None]
    labels[:, -1] = -100
    with shared.splitting([tokens, labels, positions]):
        outputs = shared.model(
            input_ids=tokens, position_ids=positions, labels=labels, shift_labels=labels, use_cache=False
        )
        shared.backward(outputs.loss / num_microbatches)


# ---- torch ----


def _by_torch(layout: str, sizes: dict[str, Any]) -> Shared:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    for block in model.model.layers:
        if layout == "fsdp2":
            fully_shard(block, mesh=mesh)
        else:
            parallelize_module(block, mesh, {name: style() for name, style in _PLAN.items()})
    if layout == "fsdp2":
        fully_shard(model, mesh=mesh)
    kinds = _kinds(model)
    return Shared(model, _adamw(kinds), torch.Tensor.backward, lambda: _clip(kinds))


def _kinds(model: nn.Module) -> list[list[nn.Parameter]]:
    # No operation on lists takes both kinds.
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is is_sharded] for is_sharded in (True, False)]
    return [kind for kind in kinds if kind]


def _adamw(kinds: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": kind} for kind in kinds], lr=5e-5, fused=True)


def _clip(kinds: list[list[nn.Parameter]]) -> None:
    norms = [nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds]
    norm = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()
    for kind in kinds:
        nn.utils.clip_grads_with_norm_(kind, _MAX_NORM, norm)


# ---- accelerate ----


def _by_accelerate(layout: str, sizes: dict[str, Any]) -> Shared:
    PartialState(cpu=True)
    # On a CPU it refuses both of them, though all but its context parallelism runs there.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = None if layout == "tensor" else FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )  # fmt: skip
    degree: dict[str, Any] = {_ACCELERATE_SIZES[layout]: dist.get_world_size()}
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(**degree))
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    if layout == "tensor":
        model = _loaded_in_parts(model)
    prepared, optimizer = accelerator.prepare(model, _adamw(_kinds(model)))

    def splitting(tensors: list[torch.Tensor]) -> AbstractContextManager[Any]:
        if layout != "context":
            return nullcontext()
        split: Any = accelerator.maybe_context_parallel(
            buffers=tensors, buffer_seq_dims=[1] * len(tensors), no_restore_buffers=set(tensors)
        )
        return split

    return Shared(
        prepared,
        optimizer,
        accelerator.backward,
        lambda: accelerator.clip_grad_norm_(prepared.parameters(), _MAX_NORM),
        # As transformers' Trainer does.
        lambda: accelerator.no_sync(prepared),
        splitting,
    )


def _loaded_in_parts(model: LlamaForCausalLM) -> Any:
    """Split over all ranks as transformers reads it, which is how accelerate wants it."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        # On the first rank alone.
        model.save_pretrained(folder[0])
        dist.barrier()
        whole = DistributedConfig(tp_size=dist.get_world_size())
        loaded = AutoModelForCausalLM.from_pretrained(folder[0], distributed_config=whole)
        dist.barrier()
    return loaded


_SHARE = {"torch": _by_torch, "accelerate": _by_accelerate}
