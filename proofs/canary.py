"""What works with which versions: `python -m proofs.canary docs/versions.md [NAME ...]`, which `make canary` does.

Builds an environment each in build/canary/, runs the same checks in all, and writes what came out.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement

from benchmarks.table import write_section

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "canary"
SHOWN = ("torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "datasets", "hydra-core", "omegaconf")
NAMES = {
    "oldest": "the lowest version of each package that `pyproject.toml` allows",
    "tested": "`constraints.txt`, which the tests use",
    "newest": "the newest release of each package",
    "candidates": "the newest, and release candidates of Hydra and OmegaConf",
}
_ALL_CASES = ("-m", "")
"""Those too that `make test` leaves out."""
CHECKS = {
    "private names": ["tests/unit/test_seams.py", "tests/unit/test_trainer_seams.py", "tests/unit/test_trl_seams.py"],
    "configs compose": ["tests/unit/config/test_shipped.py", "tests/unit/config/test_compose.py"],
    "each strategy beside one process": [
        "tests/distributed/test_layouts.py::test_same_losses_and_weights_as_one_process",
        *_ALL_CASES,
    ],
    "a pipeline generates with a cache": [
        "tests/distributed/test_sampling.py::test_every_layout_samples_the_same",
        "-k",
        "pipeline",
        *_ALL_CASES,
    ],
    "an adapter beside one process": [
        "tests/distributed/test_adapters.py::test_trains_as_one_process_does",
        *_ALL_CASES,
    ],
}
"""What is said of it -> arguments of pytest."""
_LIMIT_SECONDS = 3600


@dataclass(frozen=True)
class Outcome:
    """What a check came to in an environment."""

    num_passed: int
    num_failed: int
    reason: str = ""
    """The first line of the first failure."""

    @property
    def cell(self) -> str:
        """What the table says of it."""
        if self.num_passed + self.num_failed == 0:
            return "does not run"
        return f"{self.num_passed} of {self.num_passed + self.num_failed}"


def main(page: Path, names: list[str]) -> int:
    """Build and check, and write after each environment, so that an end in between loses little; 1: some failed."""
    columns = {}
    for name in names:
        python = _build(name)
        versions = _versions(python)
        columns[name] = versions, {what: _check(python, name, what) for what in CHECKS}
        write_section(page, "versions", "\n".join(_table(columns)))
    return int(any(outcome.reason for _, outcomes in columns.values() for outcome in outcomes.values()))


def _build(name: str) -> Path:
    """Make the environment of a row of NAMES, if it is not there, and give its Python."""
    python = BUILD / name / "bin" / "python"
    ready = BUILD / name / ".ready"
    if not ready.exists():
        sys.stderr.write(f"building {name} in {BUILD / name}\n")
        subprocess.run([sys.executable, "-m", "venv", "--clear", BUILD / name], check=True)

        def install(*words: str | Path) -> None:
            subprocess.run([python, "-m", "pip", "install", "--quiet", *words], check=True)

        pinned = ("-c", ROOT / "constraints.txt")
        install(*pinned, "torch==2.13.0")
        install(*pinned, "-e", f"{ROOT}[tests]")
        match name:
            case "oldest":
                install(*(str(wanted) for wanted in _lowest()))
            case "newest" | "candidates":
                install("--upgrade", *(requirement.name for requirement in _requirements()))
                if name == "candidates":
                    install("--upgrade", "--pre", "hydra-core", "omegaconf")
        ready.touch()
    return python


def _requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(line) for line in [*project["dependencies"], *project["optional-dependencies"]["trl"]]]


def _lowest() -> list[Requirement]:
    """Give the requirements with a next release that is too new, at their lowest version.

    The others have no bound above, and what the bounded ones need decides.
    """
    lowest = []
    for requirement in _requirements():
        bounds = {bound.operator: bound.version for bound in requirement.specifier}
        if "<" in bounds:
            lowest.append(Requirement(f"{requirement.name}=={bounds['>=']}"))
    return lowest


def _versions(python: Path) -> dict[str, str]:
    code = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    said = subprocess.run([python, "-P", "-c", code, *SHOWN], check=True, capture_output=True, text=True).stdout
    return dict(zip(SHOWN, said.split(), strict=True))


def _check(python: Path, name: str, what: str) -> Outcome:
    report = BUILD / f"{name}-{what.replace(' ', '-')}.xml"
    report.unlink(missing_ok=True)
    sys.stderr.write(f"{name}: {what}\n")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [python, "-m", "pytest", "-q", "--no-header", f"--junitxml={report}", *CHECKS[what]]
    try:
        subprocess.run(command, cwd=ROOT, env=environment, timeout=_LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Outcome(0, 0, f"not ended in {_LIMIT_SECONDS} s")
    if not report.exists():
        return Outcome(0, 0, "pytest ended before its tests")
    cases = [case for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]
    failures = [found for case in cases for kind in ("failure", "error") if (found := case.find(kind)) is not None]
    reason = (failures[0].get("message") or "").partition("\n")[0] if failures else ""
    if not cases:
        reason = "no test ran"
    return Outcome(len(cases) - len(failures), len(failures), reason)


def _table(columns: dict[str, tuple[dict[str, str], dict[str, Outcome]]]) -> list[str]:
    lines = [
        f"Written by `make canary`, Python {sys.version.split()[0]}, hfdist {importlib.metadata.version('hfdist')}.",
        "",
        "| | " + " | ".join(columns) + " |",
        "| --- |" + " --- |" * len(columns),
    ]
    for package in SHOWN:
        lines.append(f"| {package} | " + " | ".join(versions[package] for versions, _ in columns.values()) + " |")
    for what in CHECKS:
        lines.append(f"| {what} | " + " | ".join(outcomes[what].cell for _, outcomes in columns.values()) + " |")
    waits = [
        f"* {name}, {what}: `{outcome.reason[:200]}`"
        for name, (_, outcomes) in columns.items()
        for what, outcome in outcomes.items()
        if outcome.reason
    ]
    return [*lines, "", *(waits or ["Nothing failed."])]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or list(NAMES)))
