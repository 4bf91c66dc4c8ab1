"""The small model that all runs of a proof train: the asked architecture with few and narrow blocks."""

from __future__ import annotations

from transformers import PreTrainedConfig

from hfdist.config.strategy import StrategyConfig
from hfdist.models import fit_vocabulary
from hfdist.models.cache_use import set_use_cache
from hfdist.models.shrink import shrink
from hfdist.run.builder import Run
from hfdist.verify.proof_configs import ARCHITECTURE, most_stages

_FEW_BLOCKS = 4


def use_small_model(run: Run) -> None:
    """Let a run whose data are open train a small model; rank 0 writes its config down for the run on one process."""
    config, tokenizer = run.config, run.data.tokenizer
    run.architecture = small_architecture(run.architecture, config.strategy, vocab_size=len(tokenizer))
    fit_vocabulary(run.architecture, tokenizer, config.model)
    if run.topology.is_main:
        run.architecture.save_pretrained(config.run.folder.path.with_name(ARCHITECTURE))


def small_architecture(
    architecture: PreTrainedConfig, strategy: StrategyConfig, *, vocab_size: int
) -> PreTrainedConfig:
    """Give the same architecture with few and narrow blocks (at least one a stage of a pipeline), without dropout.

    Dropout is the one thing in which layouts do differ: each rank draws its own.
    """
    num_blocks = None if strategy.pipeline == 1 else max(_FEW_BLOCKS, most_stages(strategy))
    small = shrink(architecture, num_blocks=num_blocks, vocab_size=vocab_size)
    small._attn_implementation = architecture._attn_implementation
    set_use_cache(small, False)
    for part in (small, small.get_text_config()):
        for name, value in list(vars(part).items()):
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return small
