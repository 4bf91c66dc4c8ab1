"""The settings that a generator gets from its run, as JSON: in a file on the same machine, else in a message."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hfdist.config.composition.config_text import to_values
from hfdist.config.model import TokenizerConfig
from hfdist.config.plain_values import from_plain
from hfdist.config.run import RunConfig
from hfdist.environments.tools import Schema
from hfdist.messages.message import Message, read_message
from hfdist.trainer.generation.limits import GenerationLimits

_KEYS_READ = {
    "train": ("seed", "precision", "freeze", "train_only"),
    "data": ("sequence_length", "cache_dir", "chat", "images"),
}
"""Keys that a generator gets, for groups of the config that it does not get whole."""
_GROUPS_READ = ("model", "adapter", "task")
"""Groups of the config that a generator gets whole. Other keys, paths most of all, mean nothing on another machine."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of all generators of a run."""

    config: RunConfig
    """Config of the run; in a generator, the part of it that generators read, and defaults beside it."""
    vocabulary: int
    """Number of tokens that the model has."""
    limits: GenerationLimits
    """Limits of answers."""
    are_chats: bool = False
    """Whether the data hold conversations; False in a run without an environment, which does not ask."""
    tools: list[Schema] = field(default_factory=list)
    """JSON schemas of the environment's tools; []: the run has no environment, or it has no tools."""

    def to_message(self) -> dict[str, object]:
        """Give the settings as JSON, with the part of the config that generators read."""
        values: dict[str, Any] = to_values(self.config)
        config = {group: values[group] for group in _GROUPS_READ}
        config |= {group: {key: values[group][key] for key in keys} for group, keys in _KEYS_READ.items()}
        # A file of this machine. The tokenizer that generators get has its text.
        config["data"]["chat"]["template"] = None
        limits = asdict(self.limits) | {"end_ids": sorted(self.limits.end_ids)}
        own = {"vocabulary": self.vocabulary, "limits": limits, "are_chats": self.are_chats, "tools": self.tools}
        return {"config": config, **own}

    @classmethod
    def from_message(cls, message: Message) -> Settings:
        """Read settings from a message, perhaps of another machine.

        Raises:
            NotAMessageError: the message holds no settings.
            ConfigError: no config has a key of them, or the key does not take its value.
        """
        config: RunConfig = from_plain(RunConfig, message.mapping("config"))
        # Whatever a message says: code runs by a command line of this machine alone.
        config.model.trust_remote_code = False
        given = message.mapping("limits")
        limits = GenerationLimits(
            max_new_tokens=given.integer("max_new_tokens"),
            end_ids=frozenset(Message(end_id=one).integer("end_id") for one in given.list("end_ids")),
            most_tokens=None if given.get("most_tokens") is None else given.integer("most_tokens"),
            where=given.text("where"),
        )
        return cls(
            config=config,
            vocabulary=message.integer("vocabulary"),
            limits=limits,
            are_chats=message.flag("are_chats"),
            tools=message.list("tools"),
        )

    def write(self, path: Path) -> None:
        """Write the settings into a file of this machine."""
        content = self.to_message() | {"trust_remote_code": self.config.model.trust_remote_code}
        path.write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Read the settings from a file of `write`."""
        content = path.read_bytes()
        message = read_message(content, len(content))
        made = cls.from_message(message)
        # No message may set it; this file is written by the run itself.
        made.config.model.trust_remote_code = message.flag("trust_remote_code")
        return made

    def at(self, folder: Path, *, model: Path | None, adapter: Path | None, tokenizer: Path | None) -> Settings:
        """Give the settings for another machine, with its folders in place of the run's.

        Args:
            folder: folder of that machine for caches.
            model: folder of the fetched model; None: the run has no saved one.
            adapter: folder of the fetched adapter; None: the run has no saved one.
            tokenizer: folder of the fetched tokenizer; None: the generator needs none, as it reads and writes tokens.
        """
        config = self.config
        moved = replace(
            config,
            model=replace(
                config.model,
                name=_text(model),
                revision=None,
                gguf_file=None,
                tokenizer=TokenizerConfig(name=_text(tokenizer)),
            ),
            adapter=replace(config.adapter, path=_text(adapter)),
            data=replace(config.data, cache_dir=str(folder / "cache")),
        )
        return replace(self, config=moved)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
