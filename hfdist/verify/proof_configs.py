"""The three configs of a proof: the asked run made small, its second part again from a checkpoint, and one process.

All read the same short documents, several in a sequence, of which data ranks get unequal numbers of targets: where
documents are long and all their tokens are learned, wrong positions and wrong divisors do not show.
"""

from __future__ import annotations

import json
import keyword
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hfdist.checkpoint.folder import step_name
from hfdist.config.batch import BatchPlan, num_warmup_steps
from hfdist.config.checks.preflight import plan_run
from hfdist.config.data import ChatConfig, DataConfig, RowFormat, SourceConfig, cache_dir
from hfdist.config.islands import Codec, IslandsConfig, OuterRule
from hfdist.config.model import Init
from hfdist.config.optimizer import OptimizerConfig
from hfdist.config.run import EvaluateConfig, ExportConfig, LaunchConfig, RunConfig
from hfdist.config.strategy import StrategyConfig
from hfdist.data.cache import write_once
from hfdist.errors import ConfigError
from hfdist.optim.check import describe
from hfdist.optim.registry import make_small
from hfdist.records import RunFolder

_NUM_STEPS = 5
ARCHITECTURE = "architecture"
"""Folder beside the runs: the config of the small model, from which the run on one process makes it again."""
_STOPPED_STEP = 3
"""Step of the checkpoint from which the second part is trained again."""
_MOST_SEQUENCE_TOKENS = 128
_MOST_MICROBATCHES = 4
"""Most micro batches of a data rank in a step; a pipeline keeps up to two for each stage."""
_MOST_HELD_OUT_SEQUENCES = 16
_HELD_OUT_FRACTION = 0.1
_NUM_DOCUMENTS = 4000
_DOCUMENTS = "proof-1"
"""Name of the documents in the cache; to be counted up when `_documents` gives others."""
_LEAST_EPS = 1e-4
"""Adam divides a gradient by its own size, so that it makes a whole step, of random sign, from one that is zero but for
rounding (a key's bias). A larger eps keeps the weights comparable, and lets them show wrongly scaled gradients."""


class Proof(NamedTuple):
    """Three configs that differ in layout, start and folder alone."""

    folder: Path
    """Folder of all three runs."""
    layout: RunConfig
    """Config of the small run in the asked layout."""
    resumed: RunConfig
    """Config of that run's second part, from a checkpoint of the first run."""
    single: RunConfig
    """Config of the run on one process."""
    description: str
    """The layout, the arithmetic and the sizes in words, one line."""
    kernels: str = ""
    """What computed attention and the loss, in words; known once the layout has trained, and empty until then."""


def prepare_proof(config: RunConfig) -> Proof:
    """Make the asked run small, and empty `<run.dir>/prove`.

    The layout, micro batches, precision, optimizer, schedule, clipping, packing and seeds stay. The model becomes small
    by `small_architecture`. There are fewer steps, sequences and micro batches. The documents are short, and each data
    rank reads a lane of its own.

    Raises:
        ConfigError: sizes that do not divide, too few processes, or a saved adapter.
    """
    if config.adapter.path is not None:
        raise ConfigError(
            "a saved adapter does not fit the small model that a proof trains",
            where="adapter.path",
            found=config.adapter.path,
            hint="adapter=lora, with the keys of the saved one",
        )
    topology, asked = plan_run(config)
    folder = config.run.folder.proof
    if topology.is_main:
        # Other ranks look into the folder only once the process group is up, and this rank joins it after this line.
        shutil.rmtree(folder, ignore_errors=True)
    layout = _small_run(config, asked, folder / "layout")
    checkpoints = RunFolder(folder / "layout").checkpoints
    resumed = replace(
        layout,
        run=replace(layout.run, dir=str(folder / "resumed")),
        checkpoint=replace(layout.checkpoint, resume=str(checkpoints / step_name(_STOPPED_STEP))),
    )
    model, tokenizer = layout.model, layout.model.tokenizer
    if model.gguf_file is not None:
        # The tokenizer was found by the model's name, which changes here; each checkpoint has a copy.
        tokenizer = replace(tokenizer, name=str(checkpoints / step_name(1)), revision=None)
    single = replace(
        layout,
        run=replace(layout.run, dir=str(folder / "single")),
        launch=LaunchConfig(),
        strategy=StrategyConfig(data=1),
        islands=IslandsConfig(),
        model=replace(
            model,
            name=str(folder / ARCHITECTURE),
            revision=None,
            gguf_file=None,
            type=None,
            config={},
            tokenizer=tokenizer,
        ),
    )
    description = (
        f"{topology.describe()}; sharding {config.strategy.sharding.value}; {config.train.precision.value}; "
        f"{f'one island, {config.islands.method.value}; ' if config.islands.is_used else ''}"
        f"{describe(make_small(config.optimizer))}; "
        f"{_NUM_STEPS} steps of {layout.train.global_batch_size} sequences x {layout.data.sequence_length} tokens"
    )
    return Proof(folder=folder, layout=layout, resumed=resumed, single=single, description=description)


def _small_run(config: RunConfig, asked: BatchPlan, folder: Path) -> RunConfig:
    most = _MOST_MICROBATCHES
    if config.strategy.pipeline > 1:
        most = max(most, 2 * most_stages(config.strategy))
    num_microbatches = min(asked.num_microbatches, most)
    return replace(
        config,
        run=replace(config.run, dir=str(folder)),
        # Pretrained weights do not fit a small model; the architecture and the tokenizer stay.
        model=replace(config.model, init=Init.random),
        adapter=replace(config.adapter, merge=False, dropout=0.0),
        data=_short_documents(config.data, asked.data_size),
        # Numbers of blocks of the asked model do not fit the small one.
        strategy=replace(config.strategy, blocks_per_stage=None),
        islands=_one_island(config.islands),
        optimizer=_short_schedule(config.optimizer, asked, config.train.max_steps or _NUM_STEPS),
        train=replace(
            config.train,
            max_steps=_NUM_STEPS,
            epochs=None,
            global_batch_size=asked.micro_batch_size * num_microbatches * asked.data_size,
            eval_every=None,
        ),
        evaluate=EvaluateConfig(),
        checkpoint=replace(
            config.checkpoint, every=1, keep=_NUM_STEPS, keep_every=None, keep_best=False, mirror=None, resume="auto"
        ),
        report=replace(config.report, log_every=1, to=[], progress=False, plot=False, sample_tokens=0),
        export=ExportConfig(),
    )


def _short_documents(config: DataConfig, data_size: int) -> DataConfig:
    """Read documents of the proof's own: a lane for each data rank, so that most begin and end within a sequence."""
    path = cache_dir(config) / f"{_DOCUMENTS}.jsonl"
    # Each process asks for the file, as none knows of another yet. On each machine one writes it; the others wait.
    write_once(path, lambda file: file.writelines(_documents()))
    return replace(
        config,
        sources={"proof": SourceConfig(path=str(path))},
        format=RowFormat.prompt_completion,
        chat=ChatConfig(),
        anneal=[],
        quarantine=[],
        lanes=data_size,
        sequence_length=min(config.sequence_length, _MOST_SEQUENCE_TOKENS),
        eval_fraction=_HELD_OUT_FRACTION,
        eval_sources={},
        eval_sequences=min(config.eval_sequences, _MOST_HELD_OUT_SEQUENCES),
    )


def _documents() -> Iterator[bytes]:
    """Give lines of JSON: prompts of 1 to 15 words with completions of 1 to 9.

    Only completions are targets, so that sequences have unequal numbers of targets.
    """
    generator = random.Random(0)
    for _ in range(_NUM_DOCUMENTS):
        prompt = _random_words(generator, most=15)
        completion = _random_words(generator, most=9)
        # The space belongs to the completion: tokenizers put it in front of a word.
        yield json.dumps({"prompt": prompt, "completion": f" {completion}"}).encode() + b"\n"


def _random_words(generator: random.Random, most: int) -> str:
    number = generator.randint(1, most)
    return " ".join(generator.choices(keyword.kwlist, k=number))


def _one_island(islands: IslandsConfig) -> IslandsConfig:
    """Give the config of one island alone, which trains as a run without islands does.

    It exchanges within the few steps of a proof. What makes an exchange change the weights is left out.
    """
    if not islands.is_used:
        return islands
    alone = replace(islands, count=1, index=0, codec=Codec.fp32, overlap=0, mix=0.0, proximal=0.0, participation=1.0)
    # With these the weights after an exchange are the same as before it.
    averaging = replace(alone, outer_optimizer=OuterRule.nesterov, outer_lr=1.0, outer_momentum=0.0)
    return replace(averaging, every=2 * islands.fragments, staleness=0)


def most_stages(strategy: StrategyConfig) -> int:
    """Give the most stages that a pipeline may have."""
    # No schedule has more than two stages a rank unless the config asks for more.
    return strategy.pipeline * (strategy.stages_per_rank or 2)


def _short_schedule(optimizer: OptimizerConfig, batch: BatchPlan, max_steps: int) -> OptimizerConfig:
    """Give the schedule of the same shape over the steps of a proof, with an eps that keeps weights comparable."""
    asked = num_warmup_steps(optimizer, tokens_per_step=batch.tokens_per_step, max_steps=max_steps)
    warmup_steps = max(1, _NUM_STEPS * asked // max_steps) if asked > 0 else 0
    return replace(
        optimizer,
        warmup_steps=warmup_steps,
        warmup_tokens=None,
        warmup_fraction=None,
        eps=max(optimizer.eps, _LEAST_EPS),
    )
