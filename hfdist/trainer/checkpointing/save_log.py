"""What a Trainer logs of its saves: each one that has ended, its upload to the mirror, and replicas in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from transformers import Trainer

from hfdist.checkpoint.async_saver import SaveReport
from hfdist.checkpoint.mirror import Uploader
from hfdist.trainer.training import Training
from hfdist.units import duration, size

logger = logging.getLogger(__name__)


class SaveLog:
    """Logs saves on rank 0. Any one rank may call its methods.

    Args:
        training: the handle on the Trainer.
        uploader: sends each checkpoint to a mirror, on rank 0; None: there is none, or this is another rank.
    """

    def __init__(self, training: Training, uploader: Uploader | None) -> None:
        self._training, self._uploader = training, uploader
        self._replica_figures: dict[str, float] = {}
        """Figures of replicas for the next training line."""

    def add_saves(self, reports: Iterable[SaveReport]) -> None:
        """Log saves that have ended, and let their upload begin."""
        for saved in reports:
            if saved.is_replica:
                self._note_replica(saved)
            elif self._training.trainer.is_world_process_zero():
                total, stall = duration(saved.total_seconds), duration(saved.stall_seconds)
                words = "%s: %s in %s; training stood still for %s"
                logger.info(words, saved.path.name, size(saved.num_bytes), total, stall)
                self.write(_figures("checkpoint", saved))
                if self._uploader is not None:
                    self._uploader.put(saved.path)
        self.add_uploads()

    def add_uploads(self) -> None:
        """Log the uploads to the mirror that have ended since the last call."""
        for upload in [] if self._uploader is None else self._uploader.take_uploads():
            figures: dict[str, float] = {
                "mirror/step": upload.step,
                "mirror/bytes": upload.sent.all_bytes,
                "mirror/sent_bytes": upload.sent.new_bytes,
                "mirror/seconds": upload.seconds,
                "mirror/failures": upload.num_failures,
                "mirror/failed": int(upload.has_failed),
            }
            if upload.newest_step is not None:
                figures["mirror/newest_step"] = upload.newest_step
            self.write(figures)

    def _note_replica(self, saved: SaveReport) -> None:
        """Keep the figures of a replica for the next training line, which counts the stalls of all since the last."""
        figures, key = _figures("replica", saved), "replica/stall_seconds"
        self._replica_figures = figures | {key: self._replica_figures.get(key, 0.0) + figures[key]}

    def replica_figures(self) -> dict[str, float]:
        """Give what a training line says of the newest replica since the last line, if there is one, on this rank."""
        figures, self._replica_figures = self._replica_figures, {}
        return figures

    def write(self, figures: dict[str, float]) -> None:
        """Log a line of its own."""
        # Not by the class's own `log`: one that adds its metrics to each line must not spend them on this one.
        with self._training.without_epoch():
            Trainer.log(self._training.trainer, figures)


def _figures(kind: str, saved: SaveReport) -> dict[str, float]:
    return {
        f"{kind}/step": saved.step,
        f"{kind}/bytes": saved.num_bytes,
        f"{kind}/seconds": saved.total_seconds,
        f"{kind}/stall_seconds": saved.stall_seconds,
    }
