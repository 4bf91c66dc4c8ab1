"""What is in conf/, read off the folder, and the overrides that some options need."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

CONF = Path(__file__).resolve().parents[3] / "conf"
GROUPS = (
    "model", "adapter", "task", "data", "strategy", "islands", "optimizer", "train", "evaluate", "checkpoint", "watch",
    "report", "cost", "export", "experiment",
)  # fmt: skip

# A task says what rows must be: test_task.py composes each.
OPTIONS = [(group, path.stem) for group in GROUPS if group != "task" for path in sorted((CONF / group).glob("*.yaml"))]
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
ARITHMETIC = ("arithmetic_grpo", "arithmetic_sft")
"""The experiments of docs/reinforcement.md: the second makes the model of the first, and both are small."""
OF_PAGES = (*ARITHMETIC, "stdlib_mlm", "stdlib_replaced", "shapes_captions", "docstrings_search")
"""Experiments on rows that a program of a page writes, as small as they are."""

# Values that only the user knows.
NEEDED = {
    ("model", "hub"): ["model.name=some/model"],
    ("data", "files"): ["data.sources.files.path=/texts/*.parquet"],
    ("data", "chat"): ["data.sources.chat.path=/chats/*.parquet"],
    ("data", "hub"): ["data.sources.hub.path=some/dataset"],
    ("data", "mixture"): ["+data.sources.web={path: /texts/*.parquet, weight: 1}"],
    ("islands", "diloco"): ["islands.address=localhost:29600"],
    ("islands", "federated"): ["islands.address=localhost:29600"],
    ("islands", "local_sgd"): ["islands.address=localhost:29600"],
    ("islands", "parameter_server"): ["islands.address=localhost:29600"],
    ("islands", "streaming"): ["islands.address=localhost:29600"],
    ("checkpoint", "best"): ["train.eval_every=1"],
    ("data", "tokens"): ["data.sources.tokens.path=some/tokens", "model.tokenizer.name=some/tokens/tokenizer"],
}


def needed_overrides(group: str, option: str) -> list[str]:
    """The overrides without which an option cannot be used."""
    if group != "experiment":
        return NEEDED.get((group, option), [])
    text = (CONF / group / f"{option}.yaml").read_text()
    return [override for (g, o), needed in NEEDED.items() if f"override /{g}: {o}\n" in text for override in needed]


def primary_for(group: str, option: str) -> str:
    """The primary config that an option is tried with: an experiment's own, or that of pretraining."""
    return primary_of(option) if group == "experiment" else "pretrain"


def primary_of(experiment: str) -> str:
    """The primary config of the recipe that an experiment names."""
    text = (CONF / "experiment" / f"{experiment}.yaml").read_text()
    (recipe,) = set(re.findall(r"(?:recipes/|recipe=)(\w+)", text))
    return str(recipe)


def plan_of(experiment: str) -> list[str]:
    """The words after `hfdist plan` in the file of an experiment: its hardware, and how many processes."""
    text = (CONF / "experiment" / f"{experiment}.yaml").read_text()
    (line,) = re.findall(r"^# hfdist plan (.*(?:\n#   .*)*)", text, flags=re.MULTILINE)
    return shlex.split(line.replace("\n#", " "))
