"""Every command that README, docs and conf show composes, and fits the processes that its launcher starts."""

import re
import shlex

import pytest
import yaml

from hfdist.config.compose import compose_config
from hfdist.config.launch import AUTO
from hfdist.config.preflight import plan_run
from tests.unit.config.shipped import CONF

ROOT = CONF.parent
TEXTS = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").glob("*.py")),
    *sorted(CONF.rglob("*.yaml")),
]
# A line goes on behind a backslash, and in the comments of conf/ on a line that stands further in.
COMMAND = re.compile(
    r"(?:accelerate launch [^\n]*--config_file (?P<launch>conf/launch/\w+\.yaml) recipes/(?P<recipe>\w+)\.py"
    r"|(?<![\w/])hfdist (?P<command>pretrain|finetune|prove|pretokenize))"
    r"(?P<arguments>(?: (?:[^\n`]*\\\n)*[^\n`]*(?:\n#   [^\n]*)*)?)"
)
GPUS = 8


def commands():
    """Of each text, but those that end in `...`, which leave to the reader what they need."""
    for path in TEXTS:
        for found in COMMAND.finditer(path.read_text(encoding="utf-8")):
            words = shlex.split(re.sub(r"\\\n|\n#", " ", found["arguments"]), comments=True)
            if words[-1:] not in (["..."], ["--help"]):
                recipe = found["recipe"] or found["command"]
                name = f"{path.relative_to(ROOT)}: {recipe} {' '.join(words)}"
                yield pytest.param(found["launch"], recipe, words, id=name)


COMMANDS = list(commands())


def test_there_are_commands():
    assert len(COMMANDS) >= 20


@pytest.mark.parametrize(("launch", "recipe", "words"), COMMANDS)
def test_a_command_fits_its_processes(launch, recipe, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["data=chats.jsonl" if word == "data=..." else word for word in words]
    config = compose_config(words, name="finetune" if recipe == "finetune" else "pretrain")
    if launch is not None:
        num_processes = yaml.safe_load((ROOT / launch).read_text())["num_processes"]
    else:
        num_processes = GPUS if config.launch.processes == AUTO else int(config.launch.processes)
    topology, batch = plan_run(config, world_size=num_processes)
    assert topology.world_size == num_processes
    assert batch.global_batch_size % topology.data_size == 0


def test_no_two_commands_of_a_text_share_a_run():
    """The second would go on where the first has stopped, with another config."""
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        blocks = [block for block in text.split("```")[1::2] if "hfdist" in block]
        found = [match for block in blocks for match in COMMAND.finditer(block) if match["command"] != "prove"]
        words = [shlex.split(match["arguments"].replace("\\\n", " "), comments=True) for match in found]
        names = [
            next((word for word in given if word.startswith(("run.name=", "+experiment="))), match["command"])
            for match, given in zip(found, words, strict=True)
            if given[-1:] != ["..."]
        ]
        assert len(names) == len({*names}), (path.name, names)
