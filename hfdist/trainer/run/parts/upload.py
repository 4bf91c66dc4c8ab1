"""The upload of the model to the Hub."""

from __future__ import annotations

from hfdist.trainer.export.push_to_hub import check_push
from hfdist.trainer.run.parts.part import Part
from hfdist.trainer.run.state import RunState


class UploadPart(Part):
    """Uploads the model, as `export.*` says."""

    def open(self, run: RunState) -> None:
        """Make the repository.

        Raises:
            ConfigError: it cannot be written.
        """
        check_push(run.config.export)
