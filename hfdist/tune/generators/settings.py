"""What a generator must know of its run: a file of JSON, written by rank 0 and read by each generator."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from hfdist.config.composition.compose import complete, to_values
from hfdist.config.plain_values import from_plain
from hfdist.config.run import RunConfig
from hfdist.trainer.generation.limits import GenerationLimits


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of all generators of a run."""

    config: RunConfig
    vocabulary: int
    """Number of tokens that the model has."""
    limits: GenerationLimits
    policy: Path
    """The folder of `PolicyFiles`."""
    first_device: int
    """GPU of the first generator: those before it are of ranks."""

    def write(self, path: Path) -> None:
        """Write the file."""
        content = {
            "config": to_values(self.config),
            "trust_remote_code": self.config.model.trust_remote_code,
            "vocabulary": self.vocabulary,
            "limits": asdict(self.limits) | {"end_ids": sorted(self.limits.end_ids)},
            "policy": str(self.policy),
            "first_device": self.first_device,
        }
        path.write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Read the file."""
        content = json.loads(path.read_text(encoding="utf-8"))
        config: RunConfig = from_plain(RunConfig, content["config"])
        # `to_values` leaves it out, as no config file may set it; this file is written by the run itself.
        config.model.trust_remote_code = content["trust_remote_code"]
        limits = content["limits"]
        return cls(
            config=complete(config),
            vocabulary=content["vocabulary"],
            limits=GenerationLimits(**limits | {"end_ids": frozenset(limits["end_ids"])}),
            policy=Path(content["policy"]),
            first_device=content["first_device"],
        )
