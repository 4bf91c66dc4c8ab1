"""The upload of the model to the Hub."""

from __future__ import annotations

from hfdist.run.export.push_to_hub import check_push, push
from hfdist.run.parts.part import Part
from hfdist.run.state import RunState


class UploadPart(Part):
    """Uploads the model, as `export.*` says."""

    def open(self, run: RunState) -> None:
        """Make the repository.

        Raises:
            ConfigError: it cannot be written.
        """
        check_push(run.config.export)

    def finish(self, run: RunState) -> None:
        """Upload; set why it failed, if so."""
        run.not_uploaded = push(run.outcome.folder, run.config.export)
