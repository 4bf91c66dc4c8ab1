"""The picture of the losses, and the model card."""

from __future__ import annotations

import re
from pathlib import Path

from hfdist.collectives import world_size
from hfdist.run.callbacks.metrics import plot_losses
from hfdist.run.export.model_card import Exported, write_card
from hfdist.run.parts.part import Part, warning_of_failure
from hfdist.run.state import RunState


class PicturePart(Part):
    """Draws loss.png."""

    def finish(self, run: RunState) -> None:
        """Draw it, if it is asked for."""
        if run.config.report.plot:
            with warning_of_failure("picture of the losses"):
                plot_losses(run.config.run.folder, run.config.task.name)


class CardPart(Part):
    """Writes the model card."""

    def finish(self, run: RunState) -> None:
        """Write the card into the folder of the model."""
        found = run.outcome
        with warning_of_failure("model card"):
            # A download lies in a folder of its commit's name.
            name = Path(getattr(run.trainer.model, "name_or_path", "")).name
            commit = name if re.fullmatch(r"[0-9a-f]{40}", name) else None
            exported = Exported(found.step, found.loss, commit, run.usage.totals())
            write_card(found.folder, run.config, found.pools, exported, ranks=world_size())
