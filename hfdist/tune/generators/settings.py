"""What a generator must know of its run: JSON, through a file on the same machine and through a message elsewhere."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from hfdist.config.composition.complete import complete
from hfdist.config.composition.config_text import to_values
from hfdist.config.model import TokenizerConfig
from hfdist.config.plain_values import from_plain
from hfdist.config.run import RunConfig
from hfdist.environments.tools import Schema
from hfdist.messages.message import Message, read_message
from hfdist.trainer.generation.limits import GenerationLimits


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of all generators of a run."""

    config: RunConfig
    vocabulary: int
    """Number of tokens that the model has."""
    limits: GenerationLimits
    are_chats: bool = False
    """With an environment: whether the data hold conversations."""
    tools: list[Schema] = field(default_factory=list)
    """With an environment: JSON schemas of its tools."""

    def to_message(self) -> dict[str, object]:
        """Give the settings as JSON."""
        limits = asdict(self.limits) | {"end_ids": sorted(self.limits.end_ids)}
        own = {"vocabulary": self.vocabulary, "limits": limits, "are_chats": self.are_chats, "tools": self.tools}
        return {"config": to_values(self.config), **own}

    @classmethod
    def from_message(cls, message: Message) -> Settings:
        """Read them, perhaps from another machine.

        Raises:
            NotAMessageError: they are no settings.
            ConfigError: a config that no run has. It never asks for code of the model's own.
        """
        config: RunConfig = from_plain(RunConfig, message.mapping("config"))
        given = message.mapping("limits")
        ends = {f"{place}": token for place, token in enumerate(given.list("end_ids"))}
        limits = GenerationLimits(
            max_new_tokens=given.integer("max_new_tokens"),
            end_ids=frozenset(Message(ends).integer(place) for place in ends),
            most_tokens=None if given.get("most_tokens") is None else given.integer("most_tokens"),
            where=given.text("where"),
        )
        return cls(
            config=complete(config),
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
        # `to_values` leaves it out, as no config file may set it; this file is written by the run itself.
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
