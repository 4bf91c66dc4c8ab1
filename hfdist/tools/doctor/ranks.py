"""The examination by several ranks: each tries its links, and rank 0 judges and prints all findings.

rank 0                                 the others
<- facts                               tell their facts
plan: who tries which links ->         hear it
checks its machine, tries its links    the first of a machine checks it; all try their links
<- findings, pairs                     tell them
rest: slow pairs, all-reduces ->       hear it; both measure it
<- again, end                          tell the slow pairs' new figures, and their end
judges and prints
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

import torch

from hfdist.errors import ResourceError
from hfdist.host_cores import usable_cores
from hfdist.records import find_versions
from hfdist.tools.doctor.examine import Request, check_machine, report
from hfdist.tools.doctor.finding import Finding
from hfdist.tools.doctor.judge import RankFacts, describe_all_reduce, judge
from hfdist.tools.doctor.links import link_gbs, measure_all, prepare_nccl, try_pairs
from hfdist.tools.doctor.pairs import Pair, find_slow, rounds
from hfdist.tools.doctor.rendezvous import JOIN_SECONDS, Rendezvous, meet
from hfdist.tools.doctor.shared_folder import check_same_folder, marked
from hfdist.topology import LauncherPlace, read_launcher

_PLAN_SECONDS = 2 * JOIN_SECONDS
"""Seconds within which rank 0 says what is to be done."""
_MOST_RANKS = 64
"""Most ranks of which all try the links. Of more, one rank of each machine does: pairs grow with their square."""


def examine_rank(request: Request) -> None:
    """Examine as one of several ranks; rank 0 prints all, and ends with exit code 7 where there is an error.

    Raises:
        ResourceError: this rank does not reach the others.
    """
    place = read_launcher()
    rendezvous = meet(place)
    if place.rank == 0:
        _lead(request, rendezvous)
    else:
        _follow(request, rendezvous, place)


class Plan(TypedDict):
    """The plan that rank 0 sends once all ranks have come."""

    hosts: dict[str, str]
    """Names of hosts by rank."""
    ranks: list[int]
    """Ranks that try the links."""
    backends: list[str]
    """Backends to try: `gloo`, and `nccl` where all ranks have a GPU."""
    mark: str | None
    """Name of a file in rank 0's folder of runs; None: it could not be written."""


class Rest(TypedDict):
    """What is left to measure after the first tries."""

    again: dict[str, list[tuple[int, int]]]
    """Ranks of the slow pairs, by backend."""
    whole: list[str]
    """Backends by which all ranks together make an all-reduce."""


def _facts(place: LauncherPlace) -> RankFacts:
    """Give the facts of this rank."""
    has_gpu = torch.cuda.is_available() and place.local_rank < torch.cuda.device_count()
    if has_gpu:
        torch.cuda.set_device(place.local_rank)
    cores = usable_cores()
    return {
        "host": platform.node(),
        "cores": cores,
        # Without the variable, torch takes all cores.
        "threads": int(text) if (text := os.environ.get("OMP_NUM_THREADS", "")).isdecimal() else cores,
        "versions": find_versions(),
        "has_gpu": has_gpu,
        "link_gbs": link_gbs(),
    }


def _try_links(request: Request, rendezvous: Rendezvous, plan: Plan) -> list[Pair]:
    """Try all links of this rank by each backend."""
    prepare_nccl()
    found = []
    for backend in plan["backends"]:
        schedule = rounds(plan["ranks"])
        found += try_pairs(rendezvous, backend, schedule, _hosts_of(plan), request.pair_seconds)
    return found


def _try_again(request: Request, rendezvous: Rendezvous, plan: Plan, rest: Rest) -> list[Pair]:
    """Try slow pairs again, one at a time: in the first tries, all pairs of a round shared the machines."""
    found = []
    for backend, pairs in rest["again"].items():
        schedule = [[(int(a), int(b))] for a, b in pairs]
        found += try_pairs(rendezvous, backend, schedule, _hosts_of(plan), request.pair_seconds, is_second=True)
    return found


def _hosts_of(plan: Plan) -> dict[int, str]:
    """Give the host of each rank: JSON has no numbers as keys."""
    return {int(rank): host for rank, host in plan["hosts"].items()}


def _measure_all(request: Request, rendezvous: Rendezvous, plan: Plan, rest: Rest) -> dict[str, dict[str, float] | str]:
    """Measure an all-reduce of all ranks by each backend without a dead link; give speeds or an error by backend."""
    return {
        backend: measure_all(rendezvous, backend, plan["ranks"], request.pair_seconds)
        for backend in rest["whole"]
        if rendezvous.rank in plan["ranks"]
    }


def _follow(request: Request, rendezvous: Rendezvous, place: LauncherPlace) -> None:
    """Do the part of any rank but 0."""
    rendezvous.tell("facts", _facts(place))
    plan: Plan | None = rendezvous.hear("plan", 0, _PLAN_SECONDS)
    if plan is None:
        raise ResourceError("rank 0 is silent", where=f"rank {rendezvous.rank}", hint="its own output says why")
    firsts = _firsts(_hosts_of(plan))
    findings = check_machine(request, len(firsts)) if rendezvous.rank in firsts else []
    if rendezvous.rank in firsts:
        findings += check_same_folder(request.run_dir, plan["mark"], platform.node(), plan["hosts"]["0"])
    rendezvous.tell("findings", findings)
    rendezvous.tell("pairs", [pair.to_json() for pair in _try_links(request, rendezvous, plan)])
    rest: Rest | None = rendezvous.hear("rest", 0, _PLAN_SECONDS + len(plan["ranks"]) * 4 * request.pair_seconds)
    if rest is not None:
        rendezvous.tell("again", [pair.to_json() for pair in _try_again(request, rendezvous, plan, rest)])
        _measure_all(request, rendezvous, plan, rest)
    # Rank 0, which may serve the store, may have ended by now.
    with contextlib.suppress(RuntimeError):
        rendezvous.tell("end", True)


def _firsts(hosts: Mapping[int, str]) -> list[int]:
    """Give the lowest rank of each machine, which checks the machine."""
    # Later ranks come first, so that the lowest one of a host stays in the dict.
    return sorted({host: rank for rank, host in sorted(hosts.items(), reverse=True)}.values())


def _lead(request: Request, rendezvous: Rendezvous) -> None:
    """Do the part of rank 0."""
    facts: dict[int, RankFacts] = {0: _facts(read_launcher())} | rendezvous.hear_all(
        "facts", range(1, rendezvous.world_size), JOIN_SECONDS
    )
    hosts = {rank: str(one["host"]) for rank, one in facts.items()}
    num_hosts, firsts = len({*hosts.values()}), _firsts(hosts)
    ranks = sorted(hosts) if len(hosts) <= _MOST_RANKS else firsts
    backends = ["gloo", *(["nccl"] if all(facts[rank]["has_gpu"] for rank in ranks) else [])]
    with marked(request.run_dir) as mark:
        plan: Plan = {
            "hosts": {str(rank): host for rank, host in hosts.items()},
            "ranks": ranks,
            "backends": backends,
            "mark": mark,
        }
        rendezvous.tell("plan", plan)
        findings = [one._replace(host=hosts[0]) for one in check_machine(request, num_hosts)]
        patience = _PLAN_SECONDS + len(ranks) * 4 * request.pair_seconds
        pairs = _try_links(request, rendezvous, plan)
        others = [rank for rank in hosts if rank != 0]
        for rank, of_rank in rendezvous.hear_all("findings", others, patience).items():
            findings += [Finding(*finding)._replace(host=hosts[rank]) for finding in of_rank]
        pairs += _pairs_of(rendezvous.hear_all("pairs", others, patience))
    pairs = _unique(pairs)
    dead = {pair.backend for pair in pairs if pair.error is not None}
    slow = {backend: find_slow([pair for pair in pairs if pair.backend == backend]) for backend in backends}
    rest: Rest = {
        "again": {backend: [pair.ranks for pair in found] for backend, found in slow.items()},
        "whole": [backend for backend in backends if backend not in dead and len(ranks) > 2],
    }
    rendezvous.tell("rest", rest)
    again = _try_again(request, rendezvous, plan, rest) + _pairs_of(rendezvous.hear_all("again", others, patience))
    pairs = _unique(pairs + again)
    measured = _measure_all(request, rendezvous, plan, rest)
    findings += judge(facts, pairs, rendezvous.world_size)
    findings += [describe_all_reduce(backend, gbs, len(ranks)) for backend, gbs in measured.items()]
    rendezvous.hear_all("end", others, request.pair_seconds)
    report(findings, pairs, [*hosts.values()], as_json=request.as_json)


def _pairs_of(heard: Mapping[int, list[dict[str, Any]]]) -> list[Pair]:
    return [Pair.from_json(pair) for of_rank in heard.values() for pair in of_rank]


def _unique(pairs: Iterable[Pair]) -> list[Pair]:
    """Join what both ranks have said of each pair, perhaps twice: an error wins, and then the highest speed."""
    found: dict[tuple[str, tuple[int, int]], Pair] = {}
    for pair in pairs:
        key = pair.backend, pair.ranks
        before = found.get(key)
        if before is None or (before.error is None and (pair.error is not None or pair.speed > before.speed)):
            found[key] = pair
    for pair in found.values():
        if pair.error is None and pair.speed == 0.0:
            pair.error = f"rank {pair.ranks[0]} has ended meanwhile"
    return [found[key] for key in sorted(found)]
