"""The proof that a layout trains as one process does: small runs of both, and what they have left, compared by name.

There are three runs: the asked layout in small, its second part again from a checkpoint, and one process. All read the
same short documents, several in a sequence, of which data ranks get unequal numbers of targets: where documents are
long and all their tokens are learned, wrong positions and wrong divisors do not show.

Of a tensor the difference is  max |ours - reference| / max |reference|  over its elements, where the divisor is at
least a hundredth of the largest element of all tensors of its kind: a gradient that is zero but for rounding (that of a
key's bias, say) is judged on the scale of the model's gradients. A loss is a tensor of one element.
"""

from __future__ import annotations

import json
import keyword
import logging
import math
import os
import random
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig

from hfdist.checkpoint.folder import step_name
from hfdist.checkpoint.piece import MASTER
from hfdist.checkpoint.regions import list_first
from hfdist.checkpoint.save_plan import ADAPTER_STEM, MODEL_STEM, OPTIMIZER_STEM
from hfdist.collectives import on_rank_zero, rank
from hfdist.config.batch import BatchPlan, num_warmup_steps
from hfdist.config.checks.preflight import plan_run
from hfdist.config.composition.compose import to_yaml
from hfdist.config.data import ChatConfig, DataConfig, RowFormat, SourceConfig, cache_dir
from hfdist.config.islands import Codec, IslandsConfig, OuterRule
from hfdist.config.model import Dtype, Init
from hfdist.config.optimizer import OptimizerConfig, OptimizerName
from hfdist.config.run import EvaluateConfig, ExportConfig, LaunchConfig, RunConfig
from hfdist.config.strategy import StrategyConfig
from hfdist.config.train import Precision
from hfdist.data.cache import write_once
from hfdist.errors import ConfigError, HfdistError, NumericsError
from hfdist.models import fit_vocabulary
from hfdist.models.probing import shrink
from hfdist.optim.probe import describe
from hfdist.optim.registry import make_small
from hfdist.processes.child_python import python
from hfdist.records import Event, RunFolder, read_lines
from hfdist.run.builder import Run
from hfdist.topology import without_launcher

logger = logging.getLogger(__name__)

_NUM_STEPS = 5
_ARCHITECTURE = "architecture"
"""Folder beside the runs: the config of the small model, from which the run on one process makes it again."""
_STOPPED_STEP = 3
"""The checkpoint from which the second part is trained again."""
_MOST_SEQUENCE_TOKENS = 128
_MOST_MICROBATCHES = 4
"""Most micro batches of a data rank in a step; a pipeline keeps up to two for each stage."""
_FEW_BLOCKS = 4
_MOST_HELD_OUT_SEQUENCES = 16
_HELD_OUT_FRACTION = 0.1
_NUM_DOCUMENTS = 4000
_DOCUMENTS = "proof-1"
"""Name of the documents in the cache; to be counted up when `_documents` gives others."""
_LEAST_EPS = 1e-4
"""Adam divides a gradient by its own size, so that it makes a whole step, of random sign, from one that is zero but for
rounding (a key's bias). A larger eps keeps the weights comparable, and lets them show wrongly scaled gradients."""

_SINGLE_SECONDS = 1500
"""Most seconds for the run on one process: less than the half hour that a process group waits for a rank."""

FLOOR = 1e-2
"""Least divisor of a difference, as a share of the largest element of all tensors that are compared with it."""

_MOST_ROUNDED = 0.5
"""Share of float32 weights that may be numbers of a 16-bit type: those of norms are ones, until steps are large."""

_NORM_ERROR = 3e-10
"""Relative error of a norm on a CPU, for each element of the largest tensor. torch adds up squares in float32 there,
and DeepSpeed in float64: the norms of half a million elements differed by up to 8e-5, of ten million by 4e-4."""

Named = Mapping[str, torch.Tensor]


class Bounds(NamedTuple):
    """Largest relative differences that rounding explains."""

    loss: float
    grad_norm: float
    gradient: float
    weight: float
    resumed: float
    """Bound for losses and weights after a resume, which does the same arithmetic once more."""

    def on_cpu(self, num_elements: int) -> Bounds:
        """Give the bounds on a CPU: wider for norms of so many elements, and for gradients that they clip."""
        error = _NORM_ERROR * num_elements
        return self._replace(grad_norm=max(self.grad_norm, error), gradient=max(self.gradient, error))


BOUNDS = {
    Precision.fp32: Bounds(loss=1e-5, grad_norm=1e-5, gradient=1e-5, weight=1e-5, resumed=1e-5),
    # A bfloat16 number is good to 2**-8 and a float16 one to 2**-11, and layouts differ in what they round: under ZeRO
    # the weights and the gradients too. About ten times what small models show.
    Precision.bf16: Bounds(loss=2e-3, grad_norm=2e-2, gradient=1e-1, weight=5e-2, resumed=1e-4),
    Precision.fp16: Bounds(loss=5e-4, grad_norm=5e-3, gradient=3e-2, weight=1e-2, resumed=1e-4),
    # What is rounded to float8 does not depend on the layout.
    Precision.fp8: Bounds(loss=2e-3, grad_norm=2e-2, gradient=1e-1, weight=5e-2, resumed=1e-4),
}


class Row(NamedTuple):
    """One comparison: the largest relative difference and where it is."""

    what: str
    difference: float
    worst: str
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the difference is within the bound; one that is not a number is not."""
        return self.difference <= self.bound


class Certificate(NamedTuple):
    """All comparisons of a layout with one process."""

    layout: str
    """One line for people."""
    rows: tuple[Row, ...]
    kernels: str = ""
    """What computed attention and the loss, and how matrices were shared; one line, too."""
    unlike: tuple[str, ...] = ()
    """Steps that a run has skipped or done again, a line each."""

    @property
    def passed(self) -> bool:
        """Every comparison is within its bound."""
        return all(row.passed for row in self.rows)

    def __str__(self) -> str:
        cells = [("largest relative difference", "", "bound", "", "where")]
        cells += [
            (row.what, f"{row.difference:.1e}", f"{row.bound:.0e}", "pass" if row.passed else "FAIL", row.worst)
            for row in self.rows
        ]
        widths = [max(len(line[column]) for line in cells) for column in range(4)]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, [*widths, 0], strict=True)).rstrip()
            for line in cells
        ]
        verdict = f"CERTIFICATE: {'passed' if self.passed else 'failed'}"
        computed = [f"computed by: {self.kernels}"] if self.kernels else []
        lines = [f"layout: {self.layout}", *computed, *(f"  {line}" for line in table), *self.unlike, verdict]
        return "\n".join(lines)


def certify(
    layout: str, *, ours: Path, resumed: Path, reference: Path, bounds: Bounds, half: torch.dtype | None = None
) -> Certificate:
    """Compare run folders that hold a checkpoint of every step.

    `ours` is the run in the layout, `resumed` its second part once more from a checkpoint, `reference` the run on one
    process. `half` is the type of the arithmetic where the optimizer must step float32 weights beside it.
    """
    last = _last_step(reference)
    resumed_losses = _metric(resumed, "loss")
    repeated = {step: loss for step, loss in _metric(ours, "loss").items() if step in resumed_losses}
    rows = [
        *compare_runs(ours, reference, bounds),
        compare("loss after resuming", resumed_losses, repeated, bounds.resumed),
        compare("weights after resuming", _weights(resumed, last), _weights(ours, last), bounds.resumed),
    ]
    held_out = _metric(reference, "eval_loss")
    if held_out:
        rows.append(compare("held-out loss", _metric(ours, "eval_loss"), held_out, bounds.loss))
    if half is not None:
        rows.append(_share_of_rounded(_weights(ours, last), half))
    unlike = [line for run in (ours, resumed, reference) for line in _unlike_steps(run)]
    return Certificate(layout, tuple(rows), unlike=tuple(unlike))


def _share_of_rounded(weights: Named, half: torch.dtype) -> Row:
    """Find how many weights are numbers of a 16-bit type: nearly all, where the optimizer steps no float32 weights.

    This is of one run alone: both could have lost them.
    """
    is_rounded = {name: tensor.float() == tensor.to(half).float() for name, tensor in weights.items()}
    share = sum(int(same.sum()) for same in is_rounded.values()) / max(1, sum(map(torch.numel, weights.values())))
    worst = max(is_rounded, key=lambda name: int(is_rounded[name].sum()), default="there is nothing to compare")
    return Row(f"share of {str(half).removeprefix('torch.')} weights", share, worst, _MOST_ROUNDED)


def _unlike_steps(run_dir: Path) -> list[str]:
    """Say which steps of a run were skipped or done again: what is compared there has not been trained in one go."""
    said = {
        Event.skip.value: "{name}: step {step} was skipped",
        Event.rollback.value: "{name}: the ranks went back from step {step} to step {to_step}",
    }
    lines = [line for line in read_lines(RunFolder(run_dir).events) if line.get("event") in said]
    return [said[line["event"]].format(name=run_dir.name, **line) for line in lines]


def compare_runs(ours: Path, reference: Path, bounds: Bounds) -> tuple[Row, ...]:
    """Compare loss and gradient norm of every step, the gradients of the first, and the weights after the last.

    Gradients are left out where the optimizer keeps none of them, as plain SGD does.
    """
    first, last = step_name(1), _last_step(reference)
    weights = _weights(reference, last)
    if not torch.cuda.is_available():
        bounds = bounds.on_cpu(max((tensor.numel() for tensor in weights.values()), default=0))
    gradients = _gradients(reference, first)
    of_step_1 = [compare("gradients of step 1", _gradients(ours, first), gradients, bounds.gradient)]
    return (
        compare("loss", _metric(ours, "loss"), _metric(reference, "loss"), bounds.loss),
        compare("gradient norm", _metric(ours, "grad_norm"), _metric(reference, "grad_norm"), bounds.grad_norm),
        *(of_step_1 if gradients else ()),
        compare("weights at the end", _weights(ours, last), weights, bounds.weight),
    )


def _last_step(run_dir: Path) -> str:
    return max(path.name for path in RunFolder(run_dir).checkpoints.iterdir())


def compare(what: str, ours: Named, reference: Named, bound: float) -> Row:
    """Find the largest relative difference. A name that only one has, or another shape, is an infinite one."""
    unpaired = sorted(
        name
        for name in ours.keys() | reference.keys()
        if name not in ours or name not in reference or ours[name].shape != reference[name].shape
    )
    if unpaired or not reference:
        worst = (
            f"only in one, or of another shape: {list_first(unpaired)}" if unpaired else "there is nothing to compare"
        )
        return Row(what, math.inf, worst, bound)
    floor = FLOOR * max(_largest(tensor) for tensor in reference.values())
    differences = {name: _difference(ours[name], tensor, floor) for name, tensor in reference.items()}
    # What is not a number is worse than any number.
    worst = max(differences, key=lambda name: (math.isnan(differences[name]), differences[name]))
    return Row(what, differences[worst], worst, bound)


def _difference(ours: torch.Tensor, reference: torch.Tensor, floor: float) -> float:
    divisor = max(_largest(reference), floor)
    return _largest(ours.double() - reference.double()) / divisor if divisor > 0 else math.nan


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() > 0 else 0.0


def _metric(run_dir: Path, key: str) -> Named:
    lines = [line for line in read_lines(RunFolder(run_dir).metrics) if key in line]
    # A value that was not finite is null there.
    return {f"step {line['step']}": torch.tensor(math.nan if line[key] is None else line[key]) for line in lines}


def _weights(run_dir: Path, step: str) -> Named:
    """Weights by name; where an optimizer steps a float32 copy, that one."""
    saved = _saved(run_dir, step, f"{MODEL_STEM}*.safetensors") | _saved(run_dir, step, f"{ADAPTER_STEM}*.safetensors")
    return saved | _optimizer_state(run_dir, step, MASTER)


def _gradients(run_dir: Path, step: str) -> Named:
    """Gradients after clipping, by parameter: an average of them starts from zero, so that after the first step it is
    the gradient times a constant, such as Adam's 1 - beta1. The constant cancels in a relative difference.
    """
    return _optimizer_state(run_dir, step, "exp_avg") | _optimizer_state(run_dir, step, "momentum_buffer")


def _optimizer_state(run_dir: Path, step: str, key: str) -> dict[str, torch.Tensor]:
    saved = _saved(run_dir, step, f"{OPTIMIZER_STEM}-*.safetensors")
    return {name.removesuffix(f"/{key}"): tensor for name, tensor in saved.items() if name.endswith(f"/{key}")}


def _saved(run_dir: Path, step: str, pattern: str) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted((RunFolder(run_dir).checkpoints / step).glob(pattern)):
        tensors |= load_file(path)
    return tensors


# ---- the runs ----


class Proof(NamedTuple):
    """Three configs that differ in layout, start and folder alone."""

    folder: Path
    layout: RunConfig
    resumed: RunConfig
    single: RunConfig
    description: str
    kernels: str = ""
    """See `describe_kernels`: known once the layout has trained."""


def prepare_proof(config: RunConfig) -> Proof:
    """Make the asked run small, and empty `<run.dir>/prove`.

    Kept are the layout, micro batches, precision, optimizer, schedule, clipping, packing and seeds. The model is made
    small by `small_architecture`; steps, sequences and the number of micro batches are fewer; the documents are short
    ones, of which each data rank reads its own lane.

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
        # The others first look into it when the process group is up, which is not before this rank has joined.
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
        # It was found by the model's name, and lies in a checkpoint.
        tokenizer = replace(tokenizer, name=str(checkpoints / step_name(1)), revision=None)
    single = replace(
        layout,
        run=replace(layout.run, dir=str(folder / "single")),
        launch=LaunchConfig(),
        strategy=StrategyConfig(data=1),
        islands=IslandsConfig(),
        model=replace(
            model,
            name=str(folder / _ARCHITECTURE),
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


def use_small_model(run: Run) -> None:
    """Let a run whose data are open train a small model; rank 0 writes its config down for the run on one process."""
    config, tokenizer = run.config, run.data.tokenizer
    run.architecture = small_architecture(run.architecture, config.strategy, vocab_size=len(tokenizer))
    fit_vocabulary(run.architecture, tokenizer, config.model)
    if run.topology.is_main:
        run.architecture.save_pretrained(config.run.folder.path.with_name(_ARCHITECTURE))


def small_architecture(
    architecture: PreTrainedConfig, strategy: StrategyConfig, *, vocab_size: int
) -> PreTrainedConfig:
    """Give the same architecture with few and narrow blocks (at least one a stage of a pipeline), without dropout.

    Dropout is the one thing in which layouts do differ: each rank draws its own.
    """
    num_blocks = None if strategy.pipeline == 1 else max(_FEW_BLOCKS, _most_stages(strategy))
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
    config = proof.layout
    # Muon makes matrices orthogonal in bfloat16, whatever their type.
    rounds = config.model.dtype is Dtype.bfloat16 or config.optimizer.name is OptimizerName.muon
    certificate = certify(
        proof.description,
        ours=config.run.folder.path,
        resumed=proof.resumed.run.folder.path,
        reference=proof.single.run.folder.path,
        bounds=BOUNDS[Precision.bf16 if rounds else config.train.precision],
        half=_half(config),
    )._replace(kernels=proof.kernels)
    logger.info("%s", certificate)
    if certificate.passed:
        shutil.rmtree(proof.folder)
    return [row.what for row in certificate.rows if not row.passed]


def _half(config: RunConfig) -> torch.dtype | None:
    """Type of the arithmetic, where float32 weights are kept beside it."""
    if config.train.precision is Precision.fp32 or config.model.dtype not in (Dtype.auto, Dtype.float32):
        return None
    return torch.bfloat16 if config.train.precision.is_bf16 else torch.float16


def _train_single(config: RunConfig, recipe: Path) -> None:
    """Train in a fresh process that knows of no launcher."""
    folder, path = config.run.folder.path, config.run.folder.config
    folder.mkdir()
    path.write_text(to_yaml(config), encoding="utf-8")
    command = python(str(recipe), "--config-dir", str(folder), "--config-name", path.stem)
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
            timeout=_SINGLE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise HfdistError(f"the run on one process did not end in {_SINGLE_SECONDS} s", where=str(folder)) from error
    if done.returncode != 0:
        logger.error("the run on one process says:\n%s", done.stdout[-4000:])
        raise HfdistError(
            "the run on one process failed",
            where=str(folder),
            found=f"exit code {done.returncode}",
            hint=shlex.join(command),
        )


def _small_run(config: RunConfig, asked: BatchPlan, folder: Path) -> RunConfig:
    most = _MOST_MICROBATCHES
    if config.strategy.pipeline > 1:
        most = max(most, 2 * _most_stages(config.strategy))
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
            config.checkpoint, every=1, keep=_NUM_STEPS, keep_every=None, keep_best=False, resume="auto"
        ),
        report=replace(config.report, log_every=1, to=[], progress=False, plot=False, sample_tokens=0),
        export=ExportConfig(),
    )


def _short_documents(config: DataConfig, data_size: int) -> DataConfig:
    """Read documents of the proof's own: a lane for each data rank, so that most begin and end within a sequence."""
    path = cache_dir(config) / f"{_DOCUMENTS}.jsonl"
    # Each process does so, since no two of them know of each other yet: the same bytes, and whole once they are there.
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
    """Give lines of JSON: prompts of 1 to 15 words with completions of 1 to 9. Only completions are targets, so that
    sequences differ in the number of theirs.
    """
    words = random.Random(0)
    for _ in range(_NUM_DOCUMENTS):
        prompt, completion = (" ".join(words.choices(keyword.kwlist, k=words.randint(1, most))) for most in (15, 9))
        # The space belongs to the completion: tokenizers put it in front of a word.
        yield json.dumps({"prompt": prompt, "completion": f" {completion}"}).encode() + b"\n"


def _one_island(islands: IslandsConfig) -> IslandsConfig:
    """Alone, what changes the mathematics left out, and with exchanges within the few steps of a proof."""
    if not islands.is_used:
        return islands
    alone = replace(islands, count=1, index=0, codec=Codec.fp32, overlap=0, mix=0.0, proximal=0.0, participation=1.0)
    # The weights after an exchange are those before it.
    averaging = replace(alone, outer_optimizer=OuterRule.nesterov, outer_lr=1.0, outer_momentum=0.0)
    return replace(averaging, every=2 * islands.fragments, staleness=0)


def _most_stages(strategy: StrategyConfig) -> int:
    """No schedule has more than two stages a rank unless asked."""
    return strategy.pipeline * (strategy.stages_per_rank or 2)


def _short_schedule(optimizer: OptimizerConfig, batch: BatchPlan, max_steps: int) -> OptimizerConfig:
    """The same shape over `_NUM_STEPS`."""
    asked = num_warmup_steps(optimizer, tokens_per_step=batch.tokens_per_step, max_steps=max_steps)
    warmup_steps = max(1, _NUM_STEPS * asked // max_steps) if asked > 0 else 0
    return replace(
        optimizer,
        warmup_steps=warmup_steps,
        warmup_tokens=None,
        warmup_fraction=None,
        eps=max(optimizer.eps, _LEAST_EPS),
    )
