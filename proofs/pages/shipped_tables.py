"""Tables of docs/getting-started.md: extras of pyproject.toml, commands of recipes/, groups and options of conf/."""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from hfdist.__main__ import find_recipes, first_line
from hfdist.config.conf_folder import NOT_GROUPS, list_groups, list_options, shipped_folder
from hfdist.config.schema import all_keys, members

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_OF_THE_HOUSE = ("tests", "docs")
"""Extras for those who change hfdist."""
_PAGES = {
    "audit": "data.md#prove-what-was-read",
    "bandwidth": "bandwidth.md",
    "check": "choose-strategy.md#what-a-model-takes",
    "doctor": "doctor.md",
    "explain-hang": "doctor.md",
    "finetune": "fine-tuning.md",
    "generate": "generators.md#generators-on-other-machines",
    "index": "data.md#index-once",
    "job": "jobs.md",
    "plan": "plan.md",
    "pretokenize": "data.md#tokenize-once",
    "pretrain": "data.md",
    "prove": "layouts.md#prove-a-layout-before-you-pay-for-it",
    "report": "report.md",
    "serve": "islands.md",
    "sweep": "sweeps.md",
    "tune": "tune.md",
}
_OTHER_FOLDERS = {
    "cluster": "`hfdist job`, as `cluster=NAME`: the machines of a job ([job files](jobs.md))",
    "hardware": "`hfdist plan`, as `plan.hardware=NAME`: a device ([the plan](plan.md))",
    "launch": "`accelerate launch`, as `--config_file conf/launch/NAME.yaml` ([several machines](machines.md))",
    "plan": "`hfdist plan`, whose `--help` lists the keys `plan.*` ([the plan](plan.md))",
    "sweep": "`hfdist sweep`, as `sweep=NAME`: how values are chosen ([sweeps](sweeps.md))",
}
assert set(_OTHER_FOLDERS) == set(NOT_GROUPS)


def getting_started() -> str:
    """The whole page, with its tables as they should be."""
    text = (DOCS / "getting-started.md").read_text(encoding="utf-8")
    for name, table in (("extras", _extras()), ("commands", _commands()), ("groups", _groups())):
        text = put_between(text, name, table)
    return text


def put_between(text: str, name: str, lines: Iterable[str]) -> str:
    """Give the text with these lines between its marks of a name, in place of those that are there."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, rest = text.split(begin)
    return before + begin + "".join(f"{line}\n" for line in lines) + end + rest.split(end)[1]


def words_of(section: str) -> str:
    """What a section of the config is, as its class says, or the file of a group that has its own."""
    cls = all_keys()[section].type
    texts = (inspect.getdoc(cls) or "", sys.modules[cls.__module__].__doc__ or "")
    return next(text for text in texts if text.startswith("`")).partition("\n")[0].partition(": ")[2]


def _extras() -> Iterator[str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    words = dict(re.findall(r"^([\w-]+) = \[.*\] +# (.*)$", text, flags=re.MULTILINE))
    yield "| extra | what it adds | packages |"
    yield "|---|---|---|"
    for name, packages in tomllib.loads(text)["project"]["optional-dependencies"].items():
        if name not in _OF_THE_HOUSE:
            what, _, page = words[name].rpartition(": docs/")
            yield f"| [`{name}`]({page}) | {what} | {', '.join(f'`{package}`' for package in packages)} |"


def _commands() -> Iterator[str]:
    yield "| command | what it does |"
    yield "|---|---|"
    for name, path in find_recipes().items():
        yield f"| [`hfdist {name}`]({_PAGES[name]}) | {first_line(path)} |"


def _groups() -> Iterator[str]:
    folder = shipped_folder()
    yield "| group | options | what it says |"
    yield "|---|---|---|"
    groups = list_groups(folder)
    for section in members(""):
        options = _listed(folder, section) if section in groups else "(keys only)"
        yield f"| [`{section}`](keys.md#{section}) | {options} | {words_of(section).rstrip('.')} |"
    yield f"| `+experiment` | {_listed(folder, 'experiment')} | a whole [named run](experiments.md) |"
    assert set(groups) <= {*members(""), "experiment"}
    yield ""
    yield "Other folders of `conf/` belong to other commands:"
    yield ""
    yield "| folder | files | what takes them |"
    yield "|---|---|---|"
    for other, words in _OTHER_FOLDERS.items():
        yield f"| `{other}` | {_listed(folder, other)} | {words} |"


def _listed(folder: Path, group: str) -> str:
    return " ".join(f"`{option}`" for option in list_options(folder, group))
