"""Which packages are there, and which GPUs, by the driver's own tool. Loads no torch."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from hfdist.records import find_versions
from hfdist.tools.doctor.finding import Finding, Level

_TOOL, _TOOL_SECONDS = "nvidia-smi", 20
_COLUMNS = "index,name,driver_version,memory.total,memory.used,clocks_{}_reasons.active,temperature.gpu"
_REASONS = ("event", "throttle")
"""What newer and older drivers call them."""
_MOST_USED_MIB = 1024
_SLOWED = {0x08: "hardware slowdown", 0x20: "thermal, by software", 0x40: "thermal, by hardware", 0x80: "power brake"}
"""Bits of the reasons for which a GPU runs slower, as NVML has them; the others are no fault."""


def check_packages() -> Finding:
    """Compare what is installed with what hfdist's own metadata ask for."""
    check = "versions"
    try:
        asked = [Requirement(text) for text in requires("hfdist") or []]
    except PackageNotFoundError:
        return Finding.of(check, "hfdist is not installed", warning=True, hint="pip install -e . in its checkout")
    wrong: dict[str, str] = {}
    for one in asked:
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(one.name)
        except PackageNotFoundError:
            found = "not installed"
        if found == "not installed" or not one.specifier.contains(found, prereleases=True):
            wrong[f"{one.name}{one.specifier}"] = f"{one.name} {found}, and hfdist needs {one.specifier}"
    if wrong:
        hint = "pip install " + " ".join(f"'{text}'" for text in wrong)
        return Finding.of(check, "; ".join(wrong.values()), error=True, hint=hint)
    versions = find_versions()
    return Finding.of(check, ", ".join(f"{name} {versions[name]}" for name in ("Python", "torch", "transformers")))


def compare_versions(by_host: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Compare the hosts with the first."""
    (first, expected), *others = by_host.items()
    found = []
    for host, versions in others:
        differing = [f"{name} {versions.get(name)}" for name in expected if versions.get(name) != expected[name]]
        if differing:
            theirs = ", ".join(f"{name} {expected[name]}" for name in expected if versions.get(name) != expected[name])
            text = f"{', '.join(differing)}, and {first} has {theirs}"
            hint = "the same environment on all machines: `pip freeze` on one, `pip install -r` on the others"
            found.append(Finding("same versions", Level.error, text, hint, host))
    return found


def check_gpus() -> list[Finding]:
    """Check what the driver's tool tells of GPUs, their links, and what slows them."""
    cuda = _cuda_of_torch()
    if shutil.which(_TOOL) is None:
        return [Finding.of("GPUs", "none: ranks train on the CPU, over gloo")]
    tables = (_ask_tool(f"--query-gpu={_COLUMNS.format(name)}", "--format=csv,noheader,nounits") for name in _REASONS)
    listed = next((table for table in tables if table is not None), None)
    if listed is None:
        hint = f"{_TOOL} itself; the driver must be the one of the running kernel"
        return [Finding.of("GPUs", f"{_TOOL} fails", error=True, hint=hint)]
    return [*read_gpus(listed), check_cuda(cuda, _ask_tool() or ""), read_links(_ask_tool("topo", "-m") or "")]


def read_gpus(listed: str) -> list[Finding]:
    """Read the tool's table of `_COLUMNS`."""
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines() if line.count(",") >= 6]
    names = ", ".join(dict.fromkeys(f"{row[1]} with {row[3]} MiB" for row in rows))
    found = [Finding.of("GPUs", f"{len(rows)}: {names}, driver {rows[0][2]}" if rows else "none")]
    for index, _, _, _, used, reasons, degrees in (row[:7] for row in rows):
        if used.isdecimal() and int(used) > _MOST_USED_MIB:
            text, hint = f"GPU {index} has {used} MiB in use already", f"{_TOOL} lists whose; end that"
            found.append(Finding.of("GPU memory", text, warning=True, hint=hint))
        bits = int(reasons, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", reasons) else 0
        slowed = [words for bit, words in _SLOWED.items() if bits & bit]
        if slowed:
            text = f"GPU {index} is slowed: {', '.join(slowed)}, at {degrees} C"
            found.append(
                Finding.of("GPU clocks", text, warning=True, hint=f"{_TOOL} -q -d PERFORMANCE; look at its cooling")
            )
    return found


def check_cuda(built_for: str | None, banner: str) -> Finding:
    """Compare torch's build with what the driver can run, which the tool's first lines say."""
    match = re.search(r"CUDA (?:UMD )?Version:\s*(\d+)\.(\d+)", banner)
    if built_for is None:
        hint = "pip install torch without the CPU index"
        return Finding.of("CUDA", "torch is a build without CUDA, and there are GPUs", error=True, hint=hint)
    if match is None:
        return Finding.of("CUDA", f"torch is built for {built_for}; the driver does not say what it can run")
    text = f"torch is built for {built_for}, the driver runs up to {match[1]}.{match[2]}"
    is_newer = int(built_for.partition(".")[0]) > int(match[1])
    return Finding.of("CUDA", text, error=is_newer, hint=f"a newer driver, or torch for CUDA {match[1]}")


def read_links(topology: str) -> Finding:
    """Read how GPUs are connected: NV#: NVLink; PIX, PXB, PHB: PCIe of one CPU; NODE, SYS: through the CPUs."""
    kinds: dict[str, int] = {}
    for line in topology.splitlines():
        cells = line.split()
        if cells and re.fullmatch(r"GPU\d+", cells[0]):
            number = int(cells[0][3:])
            for kind in cells[1 : number + 1]:
                kinds[kind] = kinds.get(kind, 0) + 1
    text = ", ".join(f"{count} pairs by {kind}" for kind, count in sorted(kinds.items())) or "one GPU, or not known"
    return Finding.of("GPU links", text)


def _cuda_of_torch() -> str | None:
    """Read what torch was built for, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", text, flags=re.MULTILINE)
    return None if match is None else match[1]


def _ask_tool(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            [_TOOL, *arguments], capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
