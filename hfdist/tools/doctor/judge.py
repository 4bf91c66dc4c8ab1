"""The judgement of rank 0: the findings that follow from the facts and the pairs of all ranks. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from hfdist.tools.doctor import machine, software
from hfdist.tools.doctor.finding import Finding
from hfdist.tools.doctor.pairs import Pair, judge_clocks, judge_pairs


class RankFacts(TypedDict):
    """Facts of a rank and its machine, which rank 0 compares with the facts of other ranks."""

    host: str
    cores: int
    """Number of cores that processes of the machine may use."""
    threads: int
    """Number of threads of the rank."""
    versions: dict[str, str]
    """Versions of packages by their names."""
    has_gpu: bool
    """Whether there is a GPU for this rank."""
    link_gbs: float | None
    """Speed of the machine's network interface, in 10^9 bytes a second; None: not known."""


def judge(facts: Mapping[int, RankFacts], pairs: Sequence[Pair], world_size: int) -> list[Finding]:
    """Give the findings about missing ranks, versions, threads, links and clocks.

    Args:
        facts: facts of the ranks that have come, by rank.
        pairs: pairs whose links were tried.
        world_size: number of ranks that should have come.
    """
    by_host: dict[str, list[RankFacts]] = {}
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


def describe_all_reduce(backend: str, gbs: Mapping[str, float] | str, num_ranks: int) -> Finding:
    """Give a finding about an all-reduce of many ranks.

    Args:
        backend: `gloo` or `nccl`.
        gbs: 10^9 bytes a second by size in MiB, or in words why it failed.
        num_ranks: number of its ranks.
    """
    check, hint = f"{backend} all-reduce", "each pair works: NCCL_DEBUG=INFO tells more"
    if isinstance(gbs, str):
        return Finding.of(check, f"{num_ranks} ranks: {gbs}", error=True, hint=hint)
    speeds = ", ".join(f"{mib} MiB at {speed:.2f} GB/s" for mib, speed in gbs.items())
    return Finding.of(check, f"{num_ranks} ranks: {speeds}")
