"""Agree over all ranks on what travels between stages, and let each rank keep only what it needs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from hfdist.collectives import gather_json
from hfdist.errors import PartitionError
from hfdist.models.architecture import check_router_loss
from hfdist.pipeline.p2p import P2PChannel, device_of
from hfdist.pipeline.probe import ProbeResult, probe
from hfdist.pipeline.split import SplitModel
from hfdist.pipeline.stage_io import CARRIES, Carry
from hfdist.topology import Topology

_PROBE_SEQUENCES = 2
_PROBE_TOKENS = 16


@dataclass(frozen=True)
class SharedParameters:
    """Parameters that several ranks of a pipeline hold, such as a tied head and its embedding."""

    groups: tuple[tuple[dist.ProcessGroup, tuple[str, ...]], ...]
    """This rank's: the ranks that hold them, and their names."""
    counted_elsewhere: frozenset[str]
    """Those that an earlier rank counts in the norm."""


@dataclass(frozen=True)
class StageIO:
    """What all ranks have agreed on."""

    carry: Carry
    shared: SharedParameters


def infer_stage_io(cut: SplitModel, rank_of_stage: tuple[int, ...], topology: Topology, mesh: DeviceMesh) -> StageIO:
    """Find the least that must travel, and remove from each rank what none of its stages uses. A collective.

    Raises:
        ConfigError: a loss over routers.
        PartitionError: the model cannot be split at its blocks; on all ranks alike, with the reason.
    """
    _check_no_layer_drop(cut.model)
    check_router_loss(cut.model.config)
    link = P2PChannel(rank_of_stage, mesh.get_group("pipeline"), next(cut.model.parameters()).device)
    batch = _few_tokens(cut.model)
    with _portable_attention(cut.model):
        carry, found = _find_carry(cut, batch, link, mesh.get_group("pipeline"))
        problem = _keep_only(cut, found, lambda: probe(cut, carry, batch, link))
    if problem is not None:
        raise _refusal(cut, [problem])
    return StageIO(carry, _find_shared(cut, topology))


def _keep_only(cut: SplitModel, found: ProbeResult, try_again: Callable[[], ProbeResult]) -> str | None:
    """Let go of what no gradient reaches in this rank's stages, unless they do not work without. Gives the problem."""
    needed = found.needed
    unneeded = {name: p.detach() for name, p in cut.surrounding().items() if name not in needed}
    cut.remove(unneeded)
    problem = _first(_difference(found, try_again()))
    if problem is None:
        return None
    # Then something is read that is never trained, such as a table of positions: hold all that no rank trains.
    trained = set().union(*gather_json(sorted(needed)))
    for name in unneeded.keys() - trained:
        cut.restore(name, unneeded[name])
    return _first(_difference(found, try_again()))


def _difference(before: ProbeResult, after: ProbeResult) -> str | None:
    """NaN may be lost where it is compared with a number, and then it shows in what the model gives, or nowhere."""
    if after.problem is not None or before.checksum is None or after.checksum is None:
        return after.problem
    is_same = math.isclose(before.checksum, after.checksum, rel_tol=1e-6)
    return None if is_same else "it reads parameters that are not trained"


def _first(problem: str | None) -> str | None:
    """Of the problems of all ranks. A collective."""
    return next((found for found in gather_json(problem) if found is not None), None)


def _find_carry(
    cut: SplitModel, batch: dict[str, torch.Tensor], link: P2PChannel, group: dist.ProcessGroup
) -> tuple[Carry, ProbeResult]:
    problems = []
    for carry in CARRIES:
        if carry.embedding:
            _hold_embedding(cut, group)
        finding = probe(cut, carry, batch, link)
        found = [problem for problem in gather_json(finding.problem) if problem is not None]
        if not found:
            return carry, finding
        problems.append(found[0])
    raise _refusal(cut, problems)


def _check_no_layer_drop(model: PreTrainedModel) -> None:
    """Every stage runs the model's loop over blocks, and would draw for itself which ones to skip."""
    fields = model.config.get_text_config().to_dict()
    drops = {name: p for name, p in fields.items() if "layerdrop" in name and isinstance(p, float) and p > 0}
    if drops:
        raise PartitionError(
            "the model skips blocks at random, which the stages of a pipeline cannot do alike",
            where=", ".join(f"model.config.{name}" for name in drops),
            found=", ".join(map(str, drops.values())),
            allowed="0",
            hint=" ".join(f"model.config.{name}=0" for name in drops),
        )


def _refusal(cut: SplitModel, problems: list[str]) -> PartitionError:
    return PartitionError(
        f"{type(cut.model).__name__} cannot be split into pipeline stages at its blocks",
        where="strategy.pipeline",
        found="; ".join(dict.fromkeys(problems)),
        hint="strategy=ddp, strategy=zero3 or another layout without a pipeline",
    )


def _hold_embedding(cut: SplitModel, group: dist.ProcessGroup) -> None:
    """Give every rank of the pipeline the input embedding of the first stage."""
    if cut.embedding is None:
        return
    first = dist.get_global_rank(group, 0)
    if cut.embedding in cut.removed:
        removed = cut.removed[cut.embedding]
        value = torch.empty(removed.shape, dtype=cut.type_of(removed), device=device_of(group))
        dist.broadcast(value, src=first, group=group)
        cut.restore(cut.embedding, value.to(next(cut.model.parameters()).device))
    else:
        held = cut.model.get_parameter(cut.embedding).detach()
        dist.broadcast(held.to(device_of(group), copy=True), src=first, group=group)


def _find_shared(cut: SplitModel, topology: Topology) -> SharedParameters:
    """Every rank makes every group, in the same order, as torch asks."""
    own = [name for name, parameter in cut.model.named_parameters() if parameter.requires_grad]
    names_of_rank = gather_json(own)
    groups = []
    counted_elsewhere: set[str] = set()
    for data_rank in range(topology.data_size):
        holders: dict[str, list[int]] = defaultdict(list)
        for rank in topology.replica(data_rank):
            for name in names_of_rank[rank]:
                holders[name].append(rank)
        for sharing in sorted({tuple(held) for held in holders.values() if len(held) > 1}):
            names = tuple(name for name, held in holders.items() if tuple(held) == sharing)
            group = dist.new_group(list(sharing))
            if topology.rank in sharing:
                groups.append((group, names))
                if topology.rank != sharing[0]:
                    counted_elsewhere |= set(names)
    return SharedParameters(tuple(groups), frozenset(counted_elsewhere))


def _few_tokens(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    size = model.config.get_text_config().vocab_size
    tokens = torch.randint(size, (_PROBE_SEQUENCES, _PROBE_TOKENS), generator=generator)
    tokens = tokens.to(next(model.parameters()).device)
    return {"input_ids": tokens, "labels": tokens.clone()}


@contextmanager
def _portable_attention(model: PreTrainedModel) -> Iterator[None]:
    """Flash kernels run on a GPU only, and the model is still on the CPU."""
    chosen = model.config._attn_implementation
    if chosen is None or "flash" not in chosen:
        yield
        return
    model.set_attn_implementation("eager")
    yield
    model.set_attn_implementation(chosen)
