"""A run from its config to its end: data, arguments, Trainer, training, held-out loss, export."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfdist.config.cli.command import quick_imports
from hfdist.config.run import RunConfig
from hfdist.processes.startup import reporting

if TYPE_CHECKING:
    from hfdist.run.builder import Run

__all__ = ["check_model", "prepare_run"]


def check_model(config: RunConfig, processes: int) -> None:
    """Compare the layout with the model, as far as it is known, before `processes` are started; see `model_fit`."""
    with reporting("comparing the layout with the model"), quick_imports():
        from hfdist.strategies.model_fit import check_model_fits
    check_model_fits(config, processes)


def prepare_run(config: RunConfig) -> Run:
    """Check what a config names, and give the run whose steps a recipe takes.

    What is large is imported here, so that `--help`, and what the command has checked by now, need no torch; and a
    misspelt field of the model is found before most of it.
    """
    with reporting("importing torch and transformers"), quick_imports():
        from hfdist.models import check_fields

        check_fields(config.model, config.task.name.traits.head)
        from hfdist.run.builder import Run
    return Run(config)
