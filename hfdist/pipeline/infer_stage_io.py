"""Find out, before training, what must travel between the stages of a model, and refuse what cannot be split.

All ranks agree on the least that must travel, by trying (see probe.py), and each keeps only what it needs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from hfdist.collectives import device_of, first_problem, gather_json, is_planned
from hfdist.errors import PartitionError
from hfdist.models.embeddings import has_token_loss, input_embeddings
from hfdist.models.image_text import PROJECTOR, TOWER, image_example, names_of_parts, reads_images
from hfdist.models.probing import kind_of_name, unused_parameters
from hfdist.pipeline.channel import P2PChannel
from hfdist.pipeline.planned import PlannedChannel, PlannedPipeline
from hfdist.pipeline.probe import ProbeResult, probe
from hfdist.pipeline.split import SplitModel
from hfdist.pipeline.stage_io import CARRIES, Carry
from hfdist.topology import Topology

_PROBE_SEQUENCES = 2
_PROBE_TOKENS = 16
"""Tokens of each sequence with which stages are tried."""


class SharedParameters(NamedTuple):
    """Parameters that several ranks of a pipeline hold, such as a tied head and its embedding."""

    group: dist.ProcessGroup
    """The ranks that hold them."""
    names: tuple[str, ...]


@dataclass(frozen=True)
class StageIO:
    """What travels between stages, and what several ranks hold; agreed on by all ranks."""

    carry: Carry
    shared: tuple[SharedParameters, ...]
    """Parameters of this rank that others hold, too."""
    counted_elsewhere: frozenset[str]
    """Parameters that an earlier rank counts in the norm."""


def infer_stage_io(
    split: SplitModel,
    rank_of_stage: tuple[int, ...],
    topology: Topology,
    mesh: DeviceMesh,
    planned: PlannedPipeline | None = None,
) -> StageIO:
    """Find the least that must travel, and remove from each rank what none of its stages uses. A collective.

    In a plan hidden states alone travel, and a tied embedding is what ranks share.

    Raises:
        PartitionError: the model cannot be split at its blocks; on all ranks alike, with the reason.
    """
    _check_no_layer_drop(split.model)
    group = mesh.get_group("pipeline")
    device = next(split.model.parameters()).device
    channel = (
        P2PChannel(rank_of_stage, group, device)
        if planned is None
        else PlannedChannel(
            rank_of_stage,
            group,
            device,
            planned=planned,
            stages=split.stages,
            shape=(_PROBE_SEQUENCES, _PROBE_TOKENS),
        )
    )
    batch = _probe_batch(split.model, channel.device)
    with _portable_attention(split.model):
        carry, found = _find_carry(split, batch, channel, group)
        problem = _keep_only(split, found, lambda: probe(split, carry, batch, channel), group)
    if problem is not None:
        raise _refusal(split, [problem])
    holders = _planned_holders(split, rank_of_stage, topology) if is_planned() else _find_holders(split, topology)
    return StageIO(carry, *_group_holders(holders, topology))


def _probe_batch(model: PreTrainedModel, device: torch.device) -> dict[str, torch.Tensor]:
    """Give a few tokens, the same on all ranks; of a model that reads images a row with one."""
    if (example := image_example(model)) is not None:
        return {name: tensor.to(device) for name, tensor in example.tensors.items()}
    vocab_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (_PROBE_SEQUENCES, _PROBE_TOKENS), generator=generator).to(device)
    return {"input_ids": tokens, **({"labels": tokens.clone()} if has_token_loss(model) else {})}


def _keep_only(
    split: SplitModel, found: ProbeResult, try_again: Callable[[], ProbeResult], group: dist.ProcessGroup
) -> str | None:
    """Free the parameters that no gradient reaches in this rank's stages; hold them again if the probe fails then.

    What no rank of the pipeline needs stays on one. Returns the problem that is left, if any.
    """
    needed = found.needed | _readers_of_images(split)
    unneeded = {name: p.detach() for name, p in split.surrounding().items() if name not in needed}
    split.remove(unneeded)
    problem = first_problem(_difference(found, try_again()))
    if problem is not None:
        # Then something is read that is never trained, such as a table of positions: hold all that no rank trains.
        trained = set().union(*gather_json(sorted(needed)))
        for name in unneeded.keys() - trained:
            split.restore(name, unneeded[name])
        problem = first_problem(_difference(found, try_again()))
    for name in _share_unused(split, unneeded, group):
        split.restore(name, unneeded[name])
    return problem


def _readers_of_images(split: SplitModel) -> set[str]:
    """Name what the first stage reads images by. A plan tries tokens alone, which do not show it."""
    if not (split.has_first and reads_images(split.model)):
        return set()
    parts = names_of_parts(split.model)
    return {*parts[TOWER], *parts[PROJECTOR]} & split.surrounding().keys()


def _share_unused(split: SplitModel, unneeded: dict[str, torch.Tensor], group: dist.ProcessGroup) -> list[str]:
    """Choose what this rank holds of what no rank of its pipeline needs, such as a tower for images in front of text.

    Each such parameter goes to one rank, so that the ranks hold about the same. It has no gradient, so the optimizer
    passes it by, as in one process; it is there for what is saved.
    """
    freed = {name: tensor.numel() for name, tensor in unneeded.items() if name in split.removed}
    if is_planned():
        unused = unused_parameters(split.model) or frozenset()
        freed = {name: count for name, count in freed.items() if kind_of_name(name) in unused}
    num_held = sum(parameter.numel() for parameter in split.model.parameters())
    of_ranks = gather_json([num_held, sorted(split.surrounding()), freed], group)
    loads: list[int] = [load for load, _, _ in of_ranks]
    held = {name for _, names, _ in of_ranks for name in names}
    freed_by_ranks: list[dict[str, int]] = [of_rank for _, _, of_rank in of_ranks]
    counts = {name: count for of_rank in freed_by_ranks for name, count in of_rank.items() if name not in held}
    held_here = []
    # The largest first, each to the rank that holds least of those that know it.
    for name in sorted(counts, key=lambda name: (-counts[name], name)):
        holders = [rank for rank, of_rank in enumerate(freed_by_ranks) if name in of_rank]
        holder = min(holders, key=lambda rank: (loads[rank], rank))
        loads[holder] += counts[name]
        if holder == group.rank():
            held_here.append(name)
    return held_here


def _difference(before: ProbeResult, after: ProbeResult) -> str | None:
    """Say what is wrong with a probe after another one, if anything."""
    # Outputs are compared, too: a comparison with NaN may hide it, and then the loss is finite but another one.
    if after.problem is not None or before.checksum is None or after.checksum is None:
        return after.problem
    is_same = math.isclose(before.checksum, after.checksum, rel_tol=1e-6)
    return None if is_same else "it reads parameters that are not trained"


def _find_carry(
    split: SplitModel, batch: dict[str, torch.Tensor], channel: P2PChannel, group: dist.ProcessGroup
) -> tuple[Carry, ProbeResult]:
    """Find the first of `CARRIES` with which the stages of all ranks work, and what this rank saw then."""
    problems = []
    for carry in CARRIES:
        if carry.embedding:
            _hold_embedding(split, group)
        finding = probe(split, carry, batch, channel)
        problem = first_problem(finding.problem)
        if problem is None:
            return carry, finding
        problems.append(problem)
    raise _refusal(split, problems)


def _check_no_layer_drop(model: PreTrainedModel) -> None:
    """Refuse a model that skips blocks at random: each stage runs the loop over blocks, and would draw for itself."""
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


def _refusal(split: SplitModel, problems: list[str]) -> PartitionError:
    return PartitionError(
        f"{type(split.model).__name__} cannot be split into pipeline stages at its blocks",
        where="strategy.pipeline",
        found="; ".join(dict.fromkeys(problems)),
        hint="strategy=ddp, strategy=zero3 or another layout without a pipeline",
    )


def _hold_embedding(split: SplitModel, group: dist.ProcessGroup) -> None:
    """Give every rank of the pipeline the input embedding of the first stage."""
    if split.embedding is None:
        return
    first = dist.get_global_rank(group, 0)
    if split.embedding in split.removed:
        removed = split.removed[split.embedding]
        value = torch.empty(removed.shape, dtype=split.type_of(removed), device=device_of(group))
        dist.broadcast(value, src=first, group=group)
        split.restore(split.embedding, value.to(next(split.model.parameters()).device))
    else:
        held = split.model.get_parameter(split.embedding).detach()
        dist.broadcast(held.to(device_of(group), copy=True), src=first, group=group)


_Holders = list[dict[str, list[int]]]
"""For each pipeline: the ranks that hold a trained parameter, by the parameter's name."""


def _find_holders(split: SplitModel, topology: Topology) -> _Holders:
    """Ask all ranks what they train. A collective."""
    trained = [name for name, parameter in split.model.named_parameters() if parameter.requires_grad]
    names_of_rank = gather_json(trained)
    found = []
    for pipeline in topology.pipelines:
        holders: dict[str, list[int]] = defaultdict(list)
        for rank in pipeline:
            for name in names_of_rank[rank]:
                holders[name].append(rank)
        found.append(holders)
    return found


def _planned_holders(split: SplitModel, rank_of_stage: tuple[int, ...], topology: Topology) -> _Holders:
    """The first and the last stage hold a tied embedding; other ranks cannot be asked."""
    embedding, head = input_embeddings(split.model), split.model.get_output_embeddings()
    weight = getattr(embedding, "weight", None)
    is_shared = weight is not None and weight.requires_grad and weight is getattr(head, "weight", None)
    names = [name for name, parameter in split.model.named_parameters() if is_shared and parameter is weight]
    ends = sorted({rank_of_stage[0], rank_of_stage[-1]})
    return [{name: [pipeline[place] for place in ends] for name in names} for pipeline in topology.pipelines]


def _group_holders(
    holders_of_pipelines: _Holders, topology: Topology
) -> tuple[tuple[SharedParameters, ...], frozenset[str]]:
    """Give what this rank shares, and of that what an earlier rank counts in the norm. A collective.

    Every rank makes every group, in the same order, as torch asks.
    """
    shared = []
    counted_elsewhere: set[str] = set()
    for holders in holders_of_pipelines:
        for sharing in sorted({tuple(held) for held in holders.values() if len(held) > 1}):
            names = tuple(name for name, held in holders.items() if tuple(held) == sharing)
            group = dist.new_group(list(sharing))
            if topology.rank in sharing:
                shared.append(SharedParameters(group, names))
                if topology.rank != sharing[0]:
                    counted_elsewhere |= set(names)
    return tuple(shared), frozenset(counted_elsewhere)


@contextmanager
def _portable_attention(model: PreTrainedModel) -> Iterator[None]:
    """Take eager attention in place of flash kernels: these run on a GPU only, and the model is still on the CPU."""
    chosen = model.config._attn_implementation
    if chosen is None or "flash" not in chosen:
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(chosen)
