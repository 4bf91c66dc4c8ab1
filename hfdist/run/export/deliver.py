"""The folder that a trained model is delivered in: the model, or its adapter, also merged."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from hfdist.collectives import on_rank_zero
from hfdist.config.run import RunConfig
from hfdist.control_group import ControlGroup
from hfdist.run.export.merge import write_merged
from hfdist.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


def deliver(trainer: Trainer, config: RunConfig, patient: ControlGroup | None) -> Path:
    """Write the model, or the adapter and the model that it is merged into; give the folder that a user would open.

    All ranks call it; those with nothing to do wait in the group `patient`.
    """
    model, adapter = config.run.folder.model, config.run.folder.adapter
    if not config.adapter.is_used:
        trainer.save_model(str(model))
        return model
    trainer.save_model(str(adapter))
    logger.info("adapter: %s", adapter)
    if not config.adapter.merge:
        return adapter
    return model if on_rank_zero(lambda: _merge(trainer, config, adapter, model), patient) else adapter


def _merge(trainer: Trainer, config: RunConfig, adapter: Path, folder: Path) -> bool:
    model: Any = trainer.model
    assert trainer.strategy is not None
    # Where its weights were read from, and not the Hub, where a branch may have moved on since.
    base = replace(config.model, name=model.name_or_path, revision=None, gguf_file=None)
    with trainer.strategy.without_partitioning(trainer.args):
        return write_merged(
            adapter,
            folder,
            base=base,
            config=copy.deepcopy(model.config),
            generation=getattr(model, "generation_config", None),
            tokenizer=trainer.processing_class,
            head=config.task.name.traits.head,
            write_more=trainer.options.write_more,
        )
