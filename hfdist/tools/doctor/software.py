"""Checks of software and GPUs: versions of packages, and what the driver's own tool says of GPUs. Loads no torch."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from hfdist.records import find_versions
from hfdist.tools.doctor.finding import Finding, Level

_TOOL, _TOOL_SECONDS = "nvidia-smi", 20
_COLUMNS = "index,name,driver_version,memory.total,memory.used,clocks_{}_reasons.active,temperature.gpu"
_REASONS = ("event", "throttle")
"""Words in the name of the column of reasons: for newer drivers, and for older ones."""
_MOST_USED_MIB = 1024
"""A GPU with more memory in use, in MiB, is used by somebody else."""
_SLOWED = {0x08: "hardware slowdown", 0x20: "thermal, by software", 0x40: "thermal, by hardware", 0x80: "power brake"}
"""Bits of the reasons for which a GPU runs slower, as NVML has them; the others are no fault."""


class _Gpu(NamedTuple):
    """A line of the tool's table, as texts, in the order of `_COLUMNS`."""

    number: str
    name: str
    driver: str
    total_mib: str
    used_mib: str
    reasons: str
    """Bits of the reasons for which the GPU runs slower, such as `0x0000000000000008`."""
    degrees: str


def check_packages() -> Finding:
    """Compare the installed packages with what hfdist's own metadata ask for."""
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
    """Compare the versions of packages on each host with those on the first host; give a finding where they differ."""
    (first, expected), *others = by_host.items()
    found = []
    for host, versions in others:
        differing = [name for name in expected if versions.get(name) != expected[name]]
        if differing:
            here = ", ".join(f"{name} {versions.get(name)}" for name in differing)
            there = ", ".join(f"{name} {expected[name]}" for name in differing)
            text = f"{here}, and {first} has {there}"
            hint = "the same environment on all machines: `pip freeze` on one, `pip install -r` on the others"
            found.append(Finding("same versions", Level.error, text, hint, host))
    return found


def check_gpus() -> list[Finding]:
    """Check the GPUs, what slows them, their driver and their links, by what the driver's tool says."""
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
    """Give the findings that follow from the tool's table of GPUs, a line each with the values of `_COLUMNS`."""
    cells_of_lines = ([cell.strip() for cell in line.split(",")] for line in listed.splitlines())
    gpus = [_Gpu(*cells[:7]) for cells in cells_of_lines if len(cells) >= 7]
    names = ", ".join(dict.fromkeys(f"{gpu.name} with {gpu.total_mib} MiB" for gpu in gpus))
    found = [Finding.of("GPUs", f"{len(gpus)}: {names}, driver {gpus[0].driver}" if gpus else "none")]
    for gpu in gpus:
        if gpu.used_mib.isdecimal() and int(gpu.used_mib) > _MOST_USED_MIB:
            text, hint = f"GPU {gpu.number} has {gpu.used_mib} MiB in use already", f"{_TOOL} lists whose; end that"
            found.append(Finding.of("GPU memory", text, warning=True, hint=hint))
        bits = int(gpu.reasons, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", gpu.reasons) else 0
        slowed = [words for bit, words in _SLOWED.items() if bits & bit]
        if slowed:
            text = f"GPU {gpu.number} is slowed: {', '.join(slowed)}, at {gpu.degrees} C"
            found.append(
                Finding.of("GPU clocks", text, warning=True, hint=f"{_TOOL} -q -d PERFORMANCE; look at its cooling")
            )
    return found


def check_cuda(built_for: str | None, banner: str) -> Finding:
    """Compare the CUDA that torch is built for with what the driver can run.

    Args:
        built_for: version of CUDA; None: a build without CUDA.
        banner: the first lines of the tool, which have the driver's version.
    """
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
    """Count the pairs of GPUs by their kind of connection, from the tool's matrix.

    NV# is NVLink; PIX, PXB and PHB are the PCIe of one CPU; NODE and SYS go through the CPUs.
    """
    kinds: dict[str, int] = {}
    for line in topology.splitlines():
        cells = line.split()
        if cells and re.fullmatch(r"GPU\d+", cells[0]):
            number = int(cells[0].removeprefix("GPU"))
            # The matrix is symmetric: the cells left of the diagonal have each pair once.
            for kind in cells[1 : number + 1]:
                kinds[kind] = kinds.get(kind, 0) + 1
    text = ", ".join(f"{count} pairs by {kind}" for kind, count in sorted(kinds.items())) or "one GPU, or not known"
    return Finding.of("GPU links", text)


def _cuda_of_torch() -> str | None:
    """Read the version of CUDA that torch was built for, without importing torch; None: none, or not known."""
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
    """Give what the driver's tool prints; None: it fails, or does not end."""
    try:
        done = subprocess.run(
            [_TOOL, *arguments], capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
