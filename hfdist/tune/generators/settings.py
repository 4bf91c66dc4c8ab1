"""What a generator must know of its run: JSON, through a file on the same machine and through a message elsewhere."""

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
"""What a generator reads of these groups of the config."""
_GROUPS_READ = ("model", "adapter", "task")
"""Groups of the config that it gets whole. What else a run has, paths most of all, means nothing elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of all generators of a run."""

    config: RunConfig
    """Config of the run; in a generator, the part of it that generators read, and defaults beside it."""
    vocabulary: int
    """Number of tokens that the model has."""
    limits: GenerationLimits
    are_chats: bool = False
    """With an environment: whether the data hold conversations."""
    tools: list[Schema] = field(default_factory=list)
    """With an environment: JSON schemas of its tools."""

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
        """Read them, perhaps from another machine.

        Raises:
            NotAMessageError: they are no settings.
            ConfigError: a key that no config has, or a value that it does not take.
        """
        config: RunConfig = from_plain(RunConfig, message.mapping("config"))
        # Whatever a message says: code runs by a command line of this machine alone.
        config.model.trust_remote_code = False
        given = message.mapping("limits")
        ends = {f"{place}": token for place, token in enumerate(given.list("end_ids"))}
        limits = GenerationLimits(
            max_new_tokens=given.integer("max_new_tokens"),
            end_ids=frozenset(Message(ends).integer(place) for place in ends),
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
        """Write the file."""
        content = self.to_message() | {"trust_remote_code": self.config.model.trust_remote_code}
        path.write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Read the file."""
        content = path.read_bytes()
        message = read_message(content, len(content))
        made = cls.from_message(message)
        # No message may set it; this file is written by the run itself.
        made.config.model.trust_remote_code = message.flag("trust_remote_code")
        return made

    def at(self, folder: Path, *, model: Path | None, adapter: Path | None, tokenizer: Path | None) -> Settings:
        """Give those of another machine: its own folder for caches, and of model, adapter and tokenizer, if any.

        Without an environment, a generator reads and writes tokens.
        """
        config = self.config
        name = None if model is None else str(model)
        words = TokenizerConfig(name=None if tokenizer is None else str(tokenizer))
        own = replace(config.model, name=name, revision=None, gguf_file=None, tokenizer=words)
        path = None if adapter is None else str(adapter)
        data = replace(config.data, cache_dir=str(folder / "cache"))
        moved = replace(config, model=own, adapter=replace(config.adapter, path=path), data=data)
        return replace(self, config=moved)
