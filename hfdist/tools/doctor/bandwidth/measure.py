"""The measurement by several ranks: each measures in the groups that rank 0 names, and rank 0 prints all figures.

rank 0   <- facts   plan ->   [ groups, one after the other ]   <- figures, errors   end ->   prints
"""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from hfdist.errors import ResourceError
from hfdist.launch.gloo_interface import choose_gloo_interface
from hfdist.tools.doctor.bandwidth.collectives import measure, sizes_up_to
from hfdist.tools.doctor.bandwidth.figures import ALL, BETWEEN, IN_MACHINE, Figure, fit_link, slowest
from hfdist.tools.doctor.bandwidth.hardware_file import write_hardware
from hfdist.tools.doctor.bandwidth.output import as_json, as_text
from hfdist.tools.doctor.link_speed import device_of
from hfdist.tools.doctor.links import prepare_nccl, what_failed
from hfdist.tools.doctor.rendezvous import JOIN_SECONDS, Rendezvous, meet
from hfdist.topology import read_launcher
from hfdist.units import list_first

_MOST_NAMED = 20
_GROUP_SECONDS = 1800.0
"""Seconds that others may need for an earlier group: large tensors on the slowest network take about twenty minutes."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The command line of `hfdist bandwidth`, checked."""

    processes: int
    """Number of processes to start; 1: a launcher has started them."""
    largest_bytes: int
    """Size of the largest tensor."""
    call_seconds: float
    """Seconds that ranks may take to connect, and for one call."""
    as_json: bool
    """Whether the figures are printed as JSON."""
    out: Path | None = None
    """File of hardware to write, for plans; None: none is written."""
    hardware: str | None = None
    """Hardware from which the file `out` takes all that is no link; None: the device of this machine."""


class RankGroup(NamedTuple):
    """Ranks that are measured together."""

    name: str
    """ALL, IN_MACHINE or BETWEEN."""
    ranks: Sequence[int]


class _Plan(NamedTuple):
    """The plan that rank 0 tells all ranks, once they have come."""

    groups: Sequence[RankGroup]
    backend: str
    hosts: Sequence[str]
    """Host of each rank."""
    missing: Sequence[int]
    """Ranks that have not come."""


def measure_rank(request: Request) -> None:
    """Measure as one of several ranks; rank 0 prints.

    Raises:
        ResourceError: ranks do not come, cannot reach each other, or do not answer in time.
    """
    place = read_launcher()
    # A run chooses the interface in this way, too: so the links of a run are measured.
    choose_gloo_interface()
    rendezvous = meet(place)
    has_gpu = torch.cuda.is_available() and place.local_rank < torch.cuda.device_count()
    if has_gpu:
        torch.cuda.set_device(place.local_rank)
        prepare_nccl()
    rendezvous.tell("facts", {"host": platform.node(), "has_gpu": has_gpu})
    if place.rank == 0:
        rendezvous.tell("plan", _make_plan(rendezvous)._asdict())
    plan = _hear_plan(rendezvous)
    figures, failure = _measure_groups(request, rendezvous, plan)
    rendezvous.tell("figures", [asdict(figure) for figure in figures])
    # A list, as None would stand for a silent rank.
    rendezvous.tell("errors", [] if failure is None else [failure])
    if place.rank == 0:
        _report(request, plan, _gather(request, rendezvous, plan))
    else:
        # Rank 0 may serve the store.
        rendezvous.hear("end", 0, JOIN_SECONDS + request.call_seconds)


def _measure_groups(request: Request, rendezvous: Rendezvous, plan: _Plan) -> tuple[list[Figure], str | None]:
    """Measure the groups of this rank, and give the figures, and why a group failed; None: none did.

    Once a group has failed, its ranks leave out the later ones, and so do those who would meet them there.
    """
    figures: list[Figure] = []
    failure: str | None = None
    is_sound = True
    for number, group in enumerate(plan.groups):
        if rendezvous.rank not in group.ranks:
            continue
        is_sound = is_sound and have_measured(rendezvous, plan.groups[:number], group.ranks)
        if is_sound:
            try:
                with rendezvous.group(f"bandwidth-{number}", plan.backend, group.ranks, request.call_seconds):
                    figures += measure(group.name, sizes_up_to(request.largest_bytes), device_of(plan.backend))
            except Exception as error:
                # A backend may raise anything.
                failure, is_sound = what_failed(error), False
        rendezvous.tell(f"measured-{number}", is_sound)
    return figures, failure


def have_measured(
    rendezvous: Rendezvous,
    groups: Sequence[RankGroup],
    ranks: Sequence[int],
    seconds: float = _GROUP_SECONDS,
) -> bool:
    """Wait until these ranks have measured their earlier groups; False: a group has failed, or a rank is silent.

    A group has a time limit to connect, which must not begin while some of its ranks are busy in another one.
    """
    for number, group in enumerate(groups):
        others = [rank for rank in ranks if rank in group.ranks and rank != rendezvous.rank]
        heard = rendezvous.hear_all(f"measured-{number}", others, seconds)
        if not all(heard.get(rank) for rank in others):
            return False
    return True


def _make_plan(rendezvous: Rendezvous) -> _Plan:
    """Choose groups and backend on rank 0, once all ranks have said where they are."""
    ranks = range(rendezvous.world_size)
    facts = rendezvous.hear_all("facts", ranks, JOIN_SECONDS)
    hosts = {rank: str(of_rank["host"]) for rank, of_rank in facts.items()}
    backend = "nccl" if all(of_rank["has_gpu"] for of_rank in facts.values()) else "gloo"
    missing = [rank for rank in ranks if rank not in facts]
    return _Plan(groups_of(hosts), backend, [*hosts.values()], missing)


def _hear_plan(rendezvous: Rendezvous) -> _Plan:
    heard = rendezvous.hear("plan", 0, 2 * JOIN_SECONDS)
    if heard is None:
        raise ResourceError("rank 0 is silent", where=f"rank {rendezvous.rank}", hint="its own output says why")
    plan = _Plan(**heard | {"groups": [RankGroup(*group) for group in heard["groups"]]})
    if plan.missing:
        raise ResourceError(
            "not all ranks have come",
            where=f"{rendezvous.world_size} ranks",
            found=f"{len(plan.missing)} never came: {list_first(map(str, plan.missing), _MOST_NAMED)}",
            hint="their output says why; MASTER_ADDR and MASTER_PORT must be reached from their machines",
        )
    return plan


def groups_of(hosts: Mapping[int, str]) -> list[RankGroup]:
    """Give the groups of ranks that are measured, by the machine of each rank; machines are measured side by side."""
    machines: dict[str, list[int]] = {}
    for rank, host in sorted(hosts.items()):
        machines.setdefault(host, []).append(rank)
    inside = [RankGroup(IN_MACHINE, ranks) for ranks in machines.values() if len(ranks) > 1]
    if len(machines) < 2:
        return inside
    between = RankGroup(BETWEEN, [ranks[0] for ranks in machines.values()])
    return [RankGroup(ALL, sorted(hosts)), *inside, between] if inside else [between]


def _gather(request: Request, rendezvous: Rendezvous, plan: _Plan) -> list[Figure]:
    """Give the figures of all ranks on rank 0; ResourceError: a rank has failed, or is silent."""
    ranks = range(rendezvous.world_size)
    # Machines are not equally quick.
    patience = JOIN_SECONDS + request.call_seconds
    errors = rendezvous.hear_all("errors", ranks, patience)
    figures = rendezvous.hear_all("figures", ranks, patience)
    rendezvous.tell("end", True)
    failed = {rank: of_rank[0] for rank, of_rank in errors.items() if of_rank}
    failed |= {rank: "it has ended or hangs" for rank in ranks if rank not in errors}
    if failed:
        rank, error = min(failed.items())
        raise ResourceError(
            "a collective failed" if len(failed) == 1 else f"collectives failed on {len(failed)} of {len(ranks)} ranks",
            where=f"rank {rank} on {plan.hosts[rank]}, {plan.backend}",
            found=error,
            hint="`hfdist doctor`, started in the same way, tests each pair of ranks",
        )
    return slowest([Figure(**figure) for of_rank in figures.values() for figure in of_rank])


def _report(request: Request, plan: _Plan, figures: Sequence[Figure]) -> None:
    links = {group: link for group in (IN_MACHINE, BETWEEN) if (link := fit_link(figures, group)) is not None}
    write = as_json if request.as_json else as_text
    sys.stdout.write(write(figures, links, plan.backend, plan.hosts) + "\n")
    if request.out is not None:
        per_machine = max(Counter(plan.hosts).values())
        write_hardware(request.out, request.hardware, links, processes=per_machine, is_cpu=plan.backend == "gloo")
        if not request.as_json:
            sys.stdout.write(f"{request.out}: for hfdist plan plan.hardware={request.out}\n")
    sys.stdout.flush()
