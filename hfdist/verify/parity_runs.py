"""The runs of a proof: the asked layout in small, its second part again from a checkpoint, and one process."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedConfig

from hfdist.checkpoint.folder import step_name
from hfdist.collectives import on_rank_zero, rank
from hfdist.config.batch import BatchPlan, num_warmup_steps
from hfdist.config.checks.preflight import plan_run
from hfdist.config.composition.compose import to_yaml
from hfdist.config.model import Dtype, Init, ModelConfig
from hfdist.config.optimizer import OptimizerConfig, OptimizerName
from hfdist.config.run import EvaluateConfig, ExportConfig, LaunchConfig, RunConfig
from hfdist.config.strategy import StrategyConfig
from hfdist.config.train import Precision
from hfdist.errors import ConfigError, HfdistError, NumericsError
from hfdist.models import fit_vocabulary
from hfdist.models.probing import shrink
from hfdist.optim.probe import describe
from hfdist.optim.registry import make_small
from hfdist.topology import without_launcher
from hfdist.trainer.checkpointing.checkpointer import CHECKPOINTS
from hfdist.trainer.run.builder import Run
from hfdist.verify.parity import BOUNDS, certify

logger = logging.getLogger(__name__)

NUM_STEPS = 5
ARCHITECTURE = "architecture"
"""Beside the runs: the config of the small model, from which the run on one process makes it again."""
STOPPED_STEP = 3
"""The checkpoint from which the second part is trained again."""
MOST_SEQUENCE_TOKENS = 128
MOST_MICROBATCHES = 4
"""Of a data rank; a pipeline keeps up to two for each stage."""
FEW_BLOCKS = 4
MOST_HELD_OUT_SEQUENCES = 16
LEAST_EPS = 1e-4
"""Adam divides a gradient by its own size, so that it makes a whole step, of random sign, from one that is zero but for
rounding (a key's bias). A larger eps keeps the weights comparable, and lets them show wrongly scaled gradients."""

SINGLE_SECONDS = 1500
"""For the run on one process: less than the half hour that a process group waits for a rank."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Three configs that differ in layout, start and folder alone."""

    folder: Path
    layout: RunConfig
    resumed: RunConfig
    single: RunConfig
    description: str


def prepare_proof(config: RunConfig) -> Proof:
    """Make the asked run small, and empty `<run.dir>/prove`.

    Kept are the layout, micro batches, precision, optimizer, schedule, clipping, data and seeds. The model is made
    small by `small_architecture`; steps, sequences and the number of micro batches are fewer.

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
    folder = Path(config.run.dir) / "prove"
    if topology.is_main:
        # The others first look into it when the process group is up, which is not before this rank has joined.
        shutil.rmtree(folder, ignore_errors=True)
    layout = _small_run(config, asked, folder / "layout")
    checkpoints = folder / "layout" / CHECKPOINTS
    resumed = replace(
        layout,
        run=replace(layout.run, dir=str(folder / "resumed")),
        checkpoint=replace(layout.checkpoint, resume=str(checkpoints / step_name(STOPPED_STEP))),
    )
    single = replace(
        layout,
        run=replace(layout.run, dir=str(folder / "single")),
        launch=LaunchConfig(),
        strategy=StrategyConfig(data=1),
        # The tokenizer of a GGUF file lies in a checkpoint.
        model=_of_architecture(layout.model, folder / ARCHITECTURE, tokenizer=checkpoints / step_name(1)),
    )
    description = (
        f"{topology.describe()}; sharding {config.strategy.sharding.value}; {config.train.precision.value}; "
        f"{describe(make_small(config.optimizer))}; "
        f"{NUM_STEPS} steps of {layout.train.global_batch_size} sequences x {layout.data.sequence_length} tokens"
    )
    return Proof(folder=folder, layout=layout, resumed=resumed, single=single, description=description)


def _of_architecture(model: ModelConfig, architecture: Path, *, tokenizer: Path) -> ModelConfig:
    given = model.tokenizer
    if model.gguf_file is not None:
        # It was found by the model's name.
        given = replace(given, name=str(tokenizer), revision=None)
    return replace(model, name=str(architecture), revision=None, gguf_file=None, type=None, config={}, tokenizer=given)


def use_small_model(run: Run) -> None:
    """Let a run whose data are open train a small model; rank 0 writes its config down for the run on one process."""
    config, tokenizer = run.config, run.data.tokenizer
    run.architecture = small_architecture(run.architecture, config.strategy, vocab_size=len(tokenizer))
    fit_vocabulary(run.architecture, tokenizer, config.model)
    if run.topology.is_main:
        run.architecture.save_pretrained(Path(config.run.dir).with_name(ARCHITECTURE))


def small_architecture(
    architecture: PreTrainedConfig, strategy: StrategyConfig, *, vocab_size: int
) -> PreTrainedConfig:
    """Give the same architecture with few and narrow blocks (at least one a stage of a pipeline), without dropout.

    Dropout is the one thing in which layouts do differ: each rank draws its own.
    """
    num_blocks = None if strategy.pipeline == 1 else max(FEW_BLOCKS, _most_stages(strategy))
    small = shrink(architecture, num_blocks=num_blocks, vocab_size=vocab_size)
    small._attn_implementation = architecture._attn_implementation
    small.use_cache = False
    for part in (small, small.get_text_config()):
        for name, value in list(vars(part).items()):
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return small


def conclude(proof: Proof, recipe: Path) -> None:
    """Train on one process, compare, and report on rank 0. Call on all ranks, after both runs in the layout.

    The folder of a proof that passed is removed.

    Args:
        proof: from `prepare_proof`.
        recipe: the script that pretrains.

    Raises:
        NumericsError: on rank 0, a difference beyond its bound.
        HfdistError: the run on one process failed.
    """
    failed = on_rank_zero(lambda: _certify(proof, recipe))
    if failed and rank() == 0:
        raise NumericsError(
            "the layout does not train as one process does",
            where=", ".join(failed),
            found="differences beyond their bounds: see the certificate",
            hint=f"compare the runs in {proof.folder}",
        )


def _certify(proof: Proof, recipe: Path) -> list[str]:
    """Give the names of the comparisons that failed."""
    _train_single(proof.single, recipe)
    certificate = certify(
        proof.description,
        ours=Path(proof.layout.run.dir),
        resumed=Path(proof.resumed.run.dir),
        reference=Path(proof.single.run.dir),
        bounds=BOUNDS[_arithmetic(proof.layout)],
    )
    logger.info("%s", certificate)
    if certificate.passed:
        shutil.rmtree(proof.folder)
    return [row.what for row in certificate.rows if not row.passed]


def _arithmetic(config: RunConfig) -> Precision:
    # Muon makes matrices orthogonal in bfloat16, whatever their type.
    rounds = config.model.dtype is Dtype.bfloat16 or config.optimizer.name is OptimizerName.muon
    return Precision.bf16 if rounds else config.train.precision


def _train_single(config: RunConfig, recipe: Path) -> None:
    """Train in a fresh process that knows of no launcher."""
    folder = Path(config.run.dir)
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    command = [sys.executable, str(recipe), "--config-dir", str(folder), "--config-name", "config"]
    if config.model.trust_remote_code:
        command.append("model.trust_remote_code=true")
    environment = without_launcher(os.environ)
    # One device: with several, transformers would make replicas of the model.
    environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SINGLE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise HfdistError(f"the run on one process did not end in {SINGLE_SECONDS} s", where=str(folder)) from error
    if done.returncode != 0:
        logger.error("the run on one process says:\n%s", done.stdout[-4000:])
        raise HfdistError(
            "the run on one process failed",
            where=str(folder),
            found=f"exit code {done.returncode}",
            hint=" ".join(command),
        )


def _small_run(config: RunConfig, asked: BatchPlan, folder: Path) -> RunConfig:
    num_microbatches = min(asked.num_microbatches, _most_microbatches(config.strategy))
    data = config.data
    return replace(
        config,
        run=replace(config.run, dir=str(folder)),
        # Pretrained weights do not fit a small model; the architecture and the tokenizer stay.
        model=replace(config.model, init=Init.random),
        adapter=replace(config.adapter, merge=False, dropout=0.0),
        data=replace(
            data,
            sequence_length=min(data.sequence_length, MOST_SEQUENCE_TOKENS),
            eval_sequences=min(data.eval_sequences, MOST_HELD_OUT_SEQUENCES),
        ),
        # Numbers of blocks of the asked model do not fit the small one.
        strategy=replace(config.strategy, blocks_per_stage=None),
        optimizer=_short_schedule(config.optimizer, asked, config.train.max_steps or NUM_STEPS),
        train=replace(
            config.train,
            max_steps=NUM_STEPS,
            epochs=None,
            global_batch_size=asked.micro_batch_size * num_microbatches * asked.data_size,
            eval_every=None,
        ),
        evaluate=EvaluateConfig(),
        checkpoint=replace(config.checkpoint, every=1, keep=NUM_STEPS, keep_every=None, keep_best=False, resume="auto"),
        report=replace(config.report, log_every=1, to=[], progress=False, plot=False, sample_prompt=None),
        export=ExportConfig(),
    )


def _most_stages(strategy: StrategyConfig) -> int:
    """No schedule has more than two stages a rank unless asked."""
    return strategy.pipeline * (strategy.stages_per_rank or 2)


def _most_microbatches(strategy: StrategyConfig) -> int:
    return MOST_MICROBATCHES if strategy.pipeline == 1 else max(MOST_MICROBATCHES, 2 * _most_stages(strategy))


def _short_schedule(optimizer: OptimizerConfig, batch: BatchPlan, max_steps: int) -> OptimizerConfig:
    """The same shape over `NUM_STEPS`."""
    asked = num_warmup_steps(optimizer, tokens_per_step=batch.tokens_per_step, max_steps=max_steps)
    warmup_steps = max(1, NUM_STEPS * asked // max_steps) if asked > 0 else 0
    return replace(
        optimizer,
        warmup_steps=warmup_steps,
        warmup_tokens=None,
        warmup_fraction=None,
        eps=max(optimizer.eps, LEAST_EPS),
    )
