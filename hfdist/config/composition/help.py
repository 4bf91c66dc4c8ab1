"""The text of --help: groups with their options, and each key with its value and what it is."""

from __future__ import annotations

import re
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from hfdist.config.composition.request import Request
from hfdist.config.composition.yaml_text import to_yaml_text
from hfdist.config.schema import find_key

_HEAD = """\
Pretrain, fine-tune or tune on preferences a language model of transformers, in any layout, from one config.

Examples
  hfdist pretrain model=tiny train.max_steps=20
  hfdist pretrain +experiment=demo launch.processes=2
  hfdist pretrain +experiment=gpt2_xl_zero2 data.sources.files.path=FOLDER launch.processes=auto
  hfdist finetune model.name=ID data=chats.jsonl strategy=zero2 train.micro_batch_size=4 launch.processes=auto
  hfdist tune task=dpo model.name=ID data=preferences.jsonl adapter=lora
  accelerate launch --config_file conf/launch/gpu_8.yaml recipes/pretrain.py ...    (as does torchrun)
"""
_FOOT = """\
Flags: --cfg job prints the config and stops (--package model: one section; --resolve: references filled in);
--offline opens no connection, and takes the Hub's cache; --config-dir DIR adds your own folder, laid out as
conf/, whose files win; --config-name NAME starts from another primary config, such as the config.yaml of a run;
--info defaults lists the files used; --hydra-help.
Exit codes: 0 done, 2 config, 3 data, 4 checkpoint, 5 numerics, 6 a peer lost, 7 resources, 75 start again.
"""
_LINE = re.compile(r"(?P<indent> *)(?P<key>[\w.]+):(?: .*)?")
_WIDTH = 44


def describe(config: DictConfig, request: Request) -> str:
    """Write the help for a composed config, whose values may still be missing."""
    groups = "".join(
        f"  {'+' if group == 'experiment' else ''}{group}: {', '.join(options)}\n"
        for group, options in request.groups().items()
    )
    keys = "".join(f"{line}\n" for line in _keys(config))
    return f"{_HEAD}\nGroups and their options (group=option)\n{groups}\nKeys (key=value)\n{keys}\n{_FOOT}"


def _keys(config: DictConfig) -> Iterator[str]:
    """Give the lines of the config in YAML, each key with what it is."""
    parents: list[tuple[int, str]] = []
    for line in to_yaml_text(OmegaConf.to_container(config, enum_to_str=True)).splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            # The line is an item of a list.
            yield f"  {line}"
            continue
        indent = len(match["indent"])
        parents = [*((width, name) for width, name in parents if width < indent), (indent, match["key"])]
        known = find_key(".".join(name for _, name in parents))
        words = None if known is None else known.words
        yield f"  {line}" if words is None else f"  {line:<{_WIDTH}}  # {words}"
