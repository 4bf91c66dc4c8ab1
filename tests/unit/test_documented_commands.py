"""Every command that README, docs and conf show composes, and fits the processes that its launcher starts."""

import re
import shlex

import pytest
import yaml

from hfdist.config.compose import compose_config
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
    r"accelerate launch [^\n]*--config_file (?P<launch>conf/launch/\w+\.yaml)"
    r" recipes/(?P<recipe>\w+)\.py(?P<arguments>(?:[^\n`]*\\\n)*[^\n`]*(?:\n#   [^\n]*)*)"
)


def commands():
    """Of each text, but those that end in `...`, which leave to the reader what they need."""
    for path in TEXTS:
        for found in COMMAND.finditer(path.read_text(encoding="utf-8")):
            arguments = re.sub(r"\\\n|\n#", " ", found["arguments"])
            words = shlex.split(arguments)
            if words[-1:] != ["..."]:
                name = f"{path.relative_to(ROOT)}: {found['recipe']} {' '.join(words)}"
                yield pytest.param(found["launch"], found["recipe"], words, id=name)


COMMANDS = list(commands())


def test_there_are_commands():
    assert len(COMMANDS) >= 20


@pytest.mark.parametrize(("launch", "recipe", "words"), COMMANDS)
def test_a_command_fits_its_launcher(launch, recipe, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    num_processes = yaml.safe_load((ROOT / launch).read_text())["num_processes"]
    place = {"WORLD_SIZE": num_processes, "RANK": 0, "LOCAL_RANK": 0}
    for key, value in place.items() if num_processes > 1 else ():
        monkeypatch.setenv(key, str(value))
    words = ["data=chats.jsonl" if word == "data=..." else word for word in words]
    topology, batch = plan_run(compose_config(words, name="finetune" if recipe == "finetune" else "pretrain"))
    assert topology.world_size == num_processes
    assert batch.global_batch_size % topology.data_size == 0
