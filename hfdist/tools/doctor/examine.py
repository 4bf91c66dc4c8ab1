"""The examination: each rank checks its machine and its links, and rank 0 judges and prints all findings."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from hfdist.errors import ResourceError
from hfdist.host_cores import usable_cores
from hfdist.records import find_versions
from hfdist.tools.doctor import machine, software, storage
from hfdist.tools.doctor.finding import ERROR, Finding, lines, to_json
from hfdist.tools.doctor.pairs import Pair, find_slow, judge_clocks, judge_pairs, rounds
from hfdist.topology import LauncherPlace, read_launcher

if TYPE_CHECKING:
    from hfdist.tools.doctor.links import Rendezvous

_MOST_RANKS = 64
"""With more ranks, only one of each machine tries the links: the number of pairs grows with the square."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `hfdist doctor` is asked."""

    run_dir: Path
    processes: int
    """Processes to start; 1: none but this process, or what a launcher has started."""
    pair_seconds: float
    """Seconds that two ranks may take to connect, and for a message."""
    as_json: bool
    is_offline: bool = False
    """The Hub is not asked."""


def check_alone(request: Request) -> list[Finding]:
    """Check this machine without any other process, and without torch."""
    return _check_own(request, num_hosts=1)


def examine_rank(request: Request) -> None:
    """Examine as one of several ranks; rank 0 prints all, and ends with exit code 7 where there is an error.

    Raises:
        ResourceError: this rank does not reach the others.
    """
    from hfdist.tools.doctor.links import meet

    place = read_launcher()
    rendezvous = meet(place)
    if place.rank == 0:
        _lead(request, rendezvous)
    else:
        _follow(request, rendezvous, place)


def report(findings: Sequence[Finding], pairs: Sequence[Pair], hosts: Sequence[str], *, as_json: bool) -> None:
    """Print the findings, and end with exit code 7 where there is an error."""
    code = ResourceError.exit_code if any(one.level == ERROR for one in findings) else 0
    if as_json:
        found = {"findings": to_json(findings), "pairs": [pair.to_json() for pair in pairs], "hosts": [*hosts]}
        sys.stdout.write(json.dumps({"exit_code": code} | found, indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(lines(findings, len({*hosts}))) + "\n")
    sys.stdout.flush()
    if code:
        sys.exit(code)


# ---- a rank's own part ----


def _check_own(request: Request, num_hosts: int) -> list[Finding]:
    return [
        software.check_packages(),
        *software.check_gpus(),
        *machine.check_machine(num_hosts),
        *storage.check_folders(request.run_dir),
        storage.check_hub(),
    ]


class Facts(TypedDict):
    """Facts of a rank that rank 0 compares with those of others."""

    host: str
    cores: int
    threads: int
    versions: dict[str, str]
    has_gpu: bool
    link_gbs: float | None


class Plan(TypedDict):
    """The plan that rank 0 sends once all ranks have come."""

    hosts: dict[str, str]
    """Names of hosts by rank."""
    ranks: list[int]
    """Ranks that try the links."""
    backends: list[str]
    mark: str | None
    """A file in rank 0's folder of runs; None: it could not be written."""


class Rest(TypedDict):
    """What is left to measure after the first tries: slow pairs, and backends for an all-reduce of all ranks."""

    again: dict[str, list[tuple[int, int]]]
    whole: list[str]


def _facts(place: LauncherPlace) -> Facts:
    """Give the facts of this rank."""
    import torch

    from hfdist.tools.doctor.links import link_gbs

    has_gpu = torch.cuda.is_available() and place.local_rank < torch.cuda.device_count()
    if has_gpu:
        torch.cuda.set_device(place.local_rank)
    cores = usable_cores()
    return {
        "host": platform.node(),
        "cores": cores,
        # Without the variable, torch takes all of them.
        "threads": int(text) if (text := os.environ.get("OMP_NUM_THREADS", "")).isdecimal() else cores,
        "versions": find_versions(),
        "has_gpu": has_gpu,
        "link_gbs": link_gbs(),
    }


def _try_links(request: Request, rendezvous: Rendezvous, plan: Plan) -> list[Pair]:
    from hfdist.tools.doctor.links import prepare_nccl, try_pairs

    prepare_nccl()
    found = []
    for backend in plan["backends"]:
        schedule = rounds(plan["ranks"])
        found += try_pairs(rendezvous, backend, schedule, _host_of(plan), request.pair_seconds)
    return found


def _try_again(request: Request, rendezvous: Rendezvous, plan: Plan, rest: Rest) -> list[Pair]:
    """Try slow pairs again, one at a time: in the first tries, all pairs of a round shared the machines."""
    from hfdist.tools.doctor.links import try_pairs

    found = []
    for backend, pairs in rest["again"].items():
        schedule = [[(int(a), int(b))] for a, b in pairs]
        found += try_pairs(rendezvous, backend, schedule, _host_of(plan), request.pair_seconds, is_second=True)
    return found


def _host_of(plan: Plan) -> Callable[[int], str]:
    hosts = {int(rank): host for rank, host in plan["hosts"].items()}
    return hosts.__getitem__


def _measure_all(request: Request, rendezvous: Rendezvous, plan: Plan, rest: Rest) -> dict[str, dict[str, float] | str]:
    """Measure an all-reduce by the backends that have no dead link, and give the speeds by backend."""
    from hfdist.tools.doctor.links import measure_all

    return {
        backend: measure_all(rendezvous, backend, plan["ranks"], request.pair_seconds)
        for backend in rest["whole"]
        if rendezvous.rank in plan["ranks"]
    }


def _follow(request: Request, rendezvous: Rendezvous, place: LauncherPlace) -> None:
    rendezvous.tell("facts", _facts(place))
    plan: Plan | None = rendezvous.hear("plan", 0, _patience(rendezvous))
    if plan is None:
        raise ResourceError("rank 0 is silent", where=f"rank {rendezvous.rank}", hint="its own output says why")
    firsts = _firsts({int(rank): host for rank, host in plan["hosts"].items()})
    findings = _check_own(request, len(firsts)) if rendezvous.rank in firsts else []
    if rendezvous.rank in firsts:
        findings += _check_same_folder(request, plan, platform.node())
    rendezvous.tell("findings", findings)
    rendezvous.tell("pairs", [pair.to_json() for pair in _try_links(request, rendezvous, plan)])
    rest: Rest | None = rendezvous.hear(
        "rest", 0, _patience(rendezvous) + len(plan["ranks"]) * 4 * request.pair_seconds
    )
    if rest is not None:
        rendezvous.tell("again", [pair.to_json() for pair in _try_again(request, rendezvous, plan, rest)])
        _measure_all(request, rendezvous, plan, rest)
    # Rank 0 may serve the store.
    with contextlib.suppress(RuntimeError):
        rendezvous.tell("end", True)


def _patience(rendezvous: object) -> float:
    from hfdist.tools.doctor.links import JOIN_SECONDS

    return 2 * JOIN_SECONDS


def _firsts(hosts: Mapping[int, str]) -> list[int]:
    """Give the first rank of each machine, which checks the machine."""
    return sorted({host: rank for rank, host in sorted(hosts.items(), reverse=True)}.values())


# ---- rank 0's part ----


def _lead(request: Request, rendezvous: Rendezvous) -> None:
    from hfdist.tools.doctor.links import JOIN_SECONDS

    facts: dict[int, Facts] = {0: _facts(read_launcher())} | rendezvous.hear_all(
        "facts", range(1, rendezvous.world_size), JOIN_SECONDS
    )
    hosts = {rank: str(one["host"]) for rank, one in facts.items()}
    num_hosts, firsts = len({*hosts.values()}), _firsts(hosts)
    ranks = sorted(hosts) if len(hosts) <= _MOST_RANKS else firsts
    backends = ["gloo", *(["nccl"] if all(facts[rank]["has_gpu"] for rank in ranks) else [])]
    with _marked(request.run_dir) as mark:
        # JSON has no numbers as keys.
        named = {str(rank): host for rank, host in hosts.items()}
        plan: Plan = {"hosts": named, "ranks": ranks, "backends": backends, "mark": mark}
        rendezvous.tell("plan", plan)
        findings = [one._replace(host=hosts[0]) for one in _check_own(request, num_hosts)]
        patience = _patience(rendezvous) + len(ranks) * 4 * request.pair_seconds
        pairs = _try_links(request, rendezvous, plan)
        others = [rank for rank in hosts if rank != 0]
        for rank, told in rendezvous.hear_all("findings", others, patience).items():
            findings += [Finding(*one)._replace(host=hosts[rank]) for one in told]
        pairs += _pairs_of(rendezvous.hear_all("pairs", others, patience))
    pairs = _unique(pairs)
    dead = {pair.backend for pair in pairs if pair.error is not None}
    slow = {backend: find_slow([pair for pair in pairs if pair.backend == backend]) for backend in backends}
    rest: Rest = {
        "again": {backend: [pair.ranks for pair in found] for backend, found in slow.items()},
        "whole": [backend for backend in backends if backend not in dead and len(ranks) > 2],
    }
    rendezvous.tell("rest", rest)
    pairs = _unique(
        [
            *pairs,
            *_try_again(request, rendezvous, plan, rest),
            *_pairs_of(rendezvous.hear_all("again", others, patience)),
        ]
    )
    measured = _measure_all(request, rendezvous, plan, rest)
    findings += _judge(facts, pairs, rendezvous.world_size)
    findings += [_describe_all_reduce(backend, gbs, len(ranks)) for backend, gbs in measured.items()]
    rendezvous.hear_all("end", others, request.pair_seconds)
    report(findings, pairs, [*hosts.values()], as_json=request.as_json)


def _judge(facts: Mapping[int, Facts], pairs: Sequence[Pair], world_size: int) -> list[Finding]:
    """Judge what follows from the facts and pairs of all ranks."""
    by_host: dict[str, list[Facts]] = {}
    for _, one in sorted(facts.items()):
        by_host.setdefault(one["host"], []).append(one)
    findings = []
    missing = [rank for rank in range(world_size) if rank not in facts]
    if missing:
        text = f"{len(missing)} of {world_size} never came: {', '.join(map(str, missing[:20]))}"
        hint = "their output says why; MASTER_ADDR and MASTER_PORT must be reached from their machines"
        findings.append(Finding.of("ranks", text, error=True, hint=hint))
    findings += software.compare_versions({host: ranks[0]["versions"] for host, ranks in by_host.items()})
    for host, ranks in by_host.items():
        threads = machine.check_threads(ranks[0]["threads"], ranks[0]["cores"], len(ranks))
        findings.append(threads._replace(host=host))
    speeds = {host: ranks[0]["link_gbs"] for host, ranks in by_host.items() if ranks[0]["link_gbs"] is not None}
    for backend in dict.fromkeys(pair.backend for pair in pairs):
        findings += judge_pairs([pair for pair in pairs if pair.backend == backend], speeds)
    if not any(one["has_gpu"] for one in facts.values()):
        findings.append(Finding.of("nccl", "not tested: there is no GPU"))
    return findings + judge_clocks(pairs)


def _describe_all_reduce(backend: str, gbs: Mapping[str, float] | str, num_ranks: int) -> Finding:
    """Describe what an all-reduce of `num_ranks` ranks reached by MiB, or why it failed."""
    check, hint = f"{backend} all-reduce", "each pair works: NCCL_DEBUG=INFO tells more"
    if isinstance(gbs, str):
        return Finding.of(check, f"{num_ranks} ranks: {gbs}", error=True, hint=hint)
    speeds = ", ".join(f"{mib} MiB at {speed:.2f} GB/s" for mib, speed in gbs.items())
    return Finding.of(check, f"{num_ranks} ranks: {speeds}")


def _pairs_of(told: Mapping[int, Any]) -> list[Pair]:
    """Read the pairs that the other ranks have sent."""
    return [
        Pair(**one | {"ranks": tuple(one["ranks"]), "hosts": tuple(one["hosts"])})
        for of_rank in told.values()
        for one in of_rank
    ]


def _unique(pairs: Iterable[Pair]) -> list[Pair]:
    """Join what both ranks have sent of each pair, maybe twice: an error counts first, and then the greatest speed."""
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


# ---- whether all machines see one folder ----


@contextlib.contextmanager
def _marked(run_dir: Path) -> Iterator[str | None]:
    """Keep a file in the folder of runs during the block, and give its name; None: it cannot be written."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".hfdist-doctor-", dir=storage.existing_part(run_dir))
    except OSError:
        yield None
        return
    os.close(descriptor)
    try:
        yield Path(name).name
    finally:
        Path(name).unlink(missing_ok=True)


def _check_same_folder(request: Request, plan: Plan, host: str) -> list[Finding]:
    first = plan["hosts"]["0"]
    if plan["mark"] is None or host == first:
        return []
    there = storage.existing_part(request.run_dir)
    sees = (there / plan["mark"]).exists()
    text = f"{there} is {'the same folder as' if sees else 'not the folder of'} {first}"
    hint = "run.dir=FOLDER on a disk that all machines share: all ranks write into a checkpoint"
    return [Finding.of("shared folder", text, error=not sees, hint=hint)]
