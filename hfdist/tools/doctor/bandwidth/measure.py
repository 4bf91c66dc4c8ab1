"""Ranks meet as those of the doctor do, measure the groups that rank 0 names, and rank 0 says what they found."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch

from hfdist.errors import ResourceError
from hfdist.launch.gloo_interface import choose_gloo_interface
from hfdist.tools.doctor.bandwidth.collectives import measure, sizes_up_to
from hfdist.tools.doctor.bandwidth.figures import (
    ALL,
    BETWEEN,
    IN_MACHINE,
    Figure,
    Link,
    describe_seconds,
    fit_link,
    slowest,
    table,
)
from hfdist.tools.doctor.bandwidth.hardware_file import write_hardware
from hfdist.tools.doctor.links import prepare_nccl, what_failed
from hfdist.tools.doctor.rendezvous import JOIN_SECONDS, Rendezvous, meet
from hfdist.topology import LauncherPlace, read_launcher

_MOST_NAMED = 20
_GROUP_SECONDS = 3600.0
"""Seconds that others may need for an earlier group: large tensors on a slow network take some minutes."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be measured."""

    processes: int
    """Number of processes to start; 1: a launcher has started them."""
    largest_bytes: int
    call_seconds: float
    """How long ranks may take to connect, and for one call."""
    as_json: bool
    out: Path | None = None
    """The file of hardware for plans."""
    hardware: str | None = None
    """Hardware from which the file `out` takes all that is no link; None: the device at hand."""


def measure_rank(request: Request) -> None:
    """Measure as one of several ranks; rank 0 prints.

    Raises:
        ResourceError: ranks do not come, cannot reach each other, or do not answer in time.
    """
    place = read_launcher()
    # As a run does.
    choose_gloo_interface()
    rendezvous = meet(place)
    has_gpu = torch.cuda.is_available() and place.local_rank < torch.cuda.device_count()
    if has_gpu:
        torch.cuda.set_device(place.local_rank)
        prepare_nccl()
    plan = _agree(rendezvous, {"host": platform.node(), "has_gpu": has_gpu})
    figures, failure = _measure_groups(request, rendezvous, plan)
    rendezvous.tell("figures", [one.__dict__ for one in figures])
    # A list: None is what a silent rank says.
    rendezvous.tell("errors", [] if failure is None else [failure])
    if place.rank != 0:
        # Rank 0 may serve the store.
        rendezvous.hear("end", 0, JOIN_SECONDS + request.call_seconds)
        return
    _lead(request, rendezvous, plan, place)


def _measure_groups(request: Request, rendezvous: Rendezvous, plan: _Plan) -> tuple[list[Figure], str | None]:
    """Measure the groups of this rank, and give the figures, and why a group failed; None: none did.

    Once a group has failed, its ranks leave out the later ones, and so do those who would meet them there.
    """
    figures: list[Figure] = []
    failure: str | None = None
    is_sound = True
    for number, (group, ranks) in enumerate(plan["groups"]):
        if rendezvous.rank not in ranks:
            continue
        is_sound = is_sound and have_measured(rendezvous, plan["groups"][:number], ranks)
        if is_sound:
            try:
                figures += _measure_group(request, rendezvous, plan["backend"], group, ranks, number)
            except Exception as error:
                # Whatever a backend raises.
                failure, is_sound = what_failed(error), False
        rendezvous.tell(f"measured-{number}", is_sound)
    return figures, failure


def have_measured(
    rendezvous: Rendezvous,
    groups: Sequence[tuple[str, list[int]]],
    ranks: Sequence[int],
    seconds: float = _GROUP_SECONDS,
) -> bool:
    """Wait until these ranks have measured their earlier groups; False: a group has failed, or a rank is silent.

    A group has a time limit to connect, which must not begin while some of its ranks are busy in another one.
    """
    for number, (_, members) in enumerate(groups):
        others = [rank for rank in ranks if rank in members and rank != rendezvous.rank]
        heard = rendezvous.hear_all(f"measured-{number}", others, seconds)
        if not all(heard.get(rank) for rank in others):
            return False
    return True


def _measure_group(
    request: Request, rendezvous: Rendezvous, backend: str, group: str, ranks: list[int], number: int
) -> list[Figure]:
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    with rendezvous.group(f"bandwidth-{number}", backend, ranks, request.call_seconds):
        return measure(group, sizes_up_to(request.largest_bytes), device)


class _Plan(TypedDict):
    groups: list[tuple[str, list[int]]]
    backend: str
    hosts: list[str]
    missing: list[int]


def _agree(rendezvous: Rendezvous, facts: Mapping[str, object]) -> _Plan:
    """Give the groups to measure, and with which backend: rank 0 decides, once all have come."""
    rendezvous.tell("facts", facts)
    if rendezvous.rank == 0:
        heard = rendezvous.hear_all("facts", range(rendezvous.world_size), JOIN_SECONDS)
        missing = [rank for rank in range(rendezvous.world_size) if rank not in heard]
        hosts = {rank: str(one["host"]) for rank, one in heard.items()}
        backend = "nccl" if all(one["has_gpu"] for one in heard.values()) else "gloo"
        plan: _Plan = {"groups": groups_of(hosts), "backend": backend, "hosts": [*hosts.values()], "missing": missing}
        rendezvous.tell("plan", plan)
    heard_plan: _Plan | None = rendezvous.hear("plan", 0, 2 * JOIN_SECONDS)
    if heard_plan is None:
        raise ResourceError("rank 0 is silent", where=f"rank {rendezvous.rank}", hint="its own output says why")
    if heard_plan["missing"]:
        named = ", ".join(map(str, heard_plan["missing"][:_MOST_NAMED]))
        raise ResourceError(
            "not all ranks have come",
            where=f"{rendezvous.world_size} ranks",
            found=f"{len(heard_plan['missing'])} never came: {named}",
            hint="their output says why; MASTER_ADDR and MASTER_PORT must be reached from their machines",
        )
    return heard_plan


def groups_of(hosts: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """Give the groups of ranks that are measured, by the machine of each rank; machines are measured side by side."""
    machines: dict[str, list[int]] = {}
    for rank, host in sorted(hosts.items()):
        machines.setdefault(host, []).append(rank)
    inside = [(IN_MACHINE, ranks) for ranks in machines.values() if len(ranks) > 1]
    if len(machines) < 2:
        return inside
    firsts = [ranks[0] for ranks in machines.values()]
    between = [(BETWEEN, firsts)]
    return [(ALL, sorted(hosts)), *inside, *between] if inside else between


def _lead(request: Request, rendezvous: Rendezvous, plan: _Plan, place: LauncherPlace) -> None:
    ranks = range(place.world_size)
    # Machines are not equally quick.
    patience = JOIN_SECONDS + request.call_seconds
    errors = rendezvous.hear_all("errors", ranks, patience)
    told = rendezvous.hear_all("figures", ranks, patience)
    rendezvous.tell("end", True)
    failed = {rank: own[0] for rank, own in errors.items() if own}
    failed |= {rank: "it has ended or hangs" for rank in ranks if rank not in errors}
    if failed:
        rank, error = min(failed.items())
        raise ResourceError(
            "a collective failed" if len(failed) == 1 else f"collectives failed on {len(failed)} of {len(ranks)} ranks",
            where=f"rank {rank} on {plan['hosts'][rank]}, {plan['backend']}",
            found=error,
            hint="`hfdist doctor`, started in the same way, tests each pair of ranks",
        )
    figures = slowest([Figure(**one) for of_rank in told.values() for one in of_rank])
    _report(request, plan, figures)


def _report(request: Request, plan: _Plan, figures: list[Figure]) -> None:
    links = {group: link for group in (IN_MACHINE, BETWEEN) if (link := fit_link(figures, group)) is not None}
    if request.as_json:
        content = {
            "backend": plan["backend"],
            "version": _backend_version(plan["backend"]),
            "hosts": plan["hosts"],
            "links": {group: link._asdict() for group, link in links.items()},
            "figures": [one.to_json() for one in figures],
        }
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
    else:
        sys.stdout.write("\n".join([_head(plan), "", *table(figures), *_describe(links)]) + "\n")
    if request.out is not None:
        per_machine = max(plan["hosts"].count(host) for host in plan["hosts"])
        write_hardware(request.out, request.hardware, links, processes=per_machine, is_cpu=plan["backend"] == "gloo")
        if not request.as_json:
            sys.stdout.write(f"{request.out}: for hfdist plan plan.hardware={request.out}\n")
    sys.stdout.flush()


def _head(plan: _Plan) -> str:
    hosts = plan["hosts"]
    machines = ", ".join(f"{host} ({hosts.count(host)})" for host in dict.fromkeys(hosts))
    return f"{_backend_version(plan['backend'])}, {len(hosts)} ranks: {machines}"


def _backend_version(backend: str) -> str:
    """Give the backend, and what is known of how it works."""
    if backend == "gloo":
        return f"gloo of torch {torch.__version__}"
    settings = [f"{name}={os.environ[name]}" for name in ("NCCL_ALGO", "NCCL_PROTO") if name in os.environ]
    return " ".join(["NCCL", ".".join(map(str, torch.cuda.nccl.version())), *settings])


def _describe(links: Mapping[str, Link]) -> list[str]:
    return [
        f"a rank's link {group}: {link.gbs:.3g} GB/s, {describe_seconds(link.latency_seconds)} a message"
        for group, link in links.items()
    ]
