"""Peer: Lightning's Trainer, in a process that sees its packages; see benchmarks/peers.

python -m benchmarks.loop.lightning_loop FOLDER FILE_DESCRIPTOR
"""

from __future__ import annotations

import logging
import sys
import warnings
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any

import lightning
import torch

from benchmarks.loop.work import LOG_EVERY, MAX_GRAD_NORM, Gate, Work, make_optimizer, make_schedule


class Module(lightning.LightningModule):
    """The model, its optimizer and its schedule."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.model, self._work = work.model(), work
        self.losses: list[float] = []
        self._total = torch.zeros(())

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        """Forward of one micro batch; reads the loss as the others do, and not through `self.log`, which costs more."""
        loss: torch.Tensor = self.model(**batch).loss
        self._total += loss.detach()
        if (number + 1) % (LOG_EVERY * self._work.accumulation) == 0:
            self.losses.append(self._total.item() / LOG_EVERY)
            self._total.zero_()
        # It divides by their number, and the loss is divided by the targets of all of them already.
        return loss * self._work.accumulation

    def configure_optimizers(self) -> Any:
        """Give both."""
        optimizer = make_optimizer(self.model)
        schedule = make_schedule(optimizer, self._work.num_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class _Batches:
    def __init__(self, work: Work, gate: Gate) -> None:
        self._work, self._gate = work, gate

    def __iter__(self) -> Any:
        return self._work.batches(self._gate, counted=True)


def main(folder: str, descriptor: str) -> None:
    """Train."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    work = Work.read(folder)
    gate = Gate(Connection(int(descriptor)), work.steps_per_burst)
    module = Module(work)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=work.num_steps,
        max_epochs=1,
        accumulate_grad_batches=work.accumulation,
        gradient_clip_val=MAX_GRAD_NORM,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, _Batches(work, gate))
    gate.end(module.losses, version("lightning"))


if __name__ == "__main__":
    main(*sys.argv[1:])
