"""The end of a run: held-out loss beside a baseline, the exported model with its card, what it can do, a picture."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfdist.checkpoint.folder import step_name
from hfdist.collectives import gather_json, on_rank_zero, world_size
from hfdist.config.run import Export, RunConfig
from hfdist.config.task import TaskName
from hfdist.data import LEDGER, HeldOut, HeldOutSources, describe_losses
from hfdist.data.stream.ledger import read_records
from hfdist.errors import HfdistError
from hfdist.trainer.budget.usage import Usage, describe_usage
from hfdist.trainer.evaluation import lm_eval
from hfdist.trainer.evaluation.loop import perplexity
from hfdist.trainer.export.merge import write_merged
from hfdist.trainer.export.model_card import Exported, write_card
from hfdist.trainer.export.push_to_hub import push
from hfdist.trainer.reporting.callbacks import plot_losses
from hfdist.trainer.reporting.peak_memory import largest_peaks
from hfdist.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

MODEL = "model"
ADAPTER = "adapter"

_LONGEST_WAIT = timedelta(days=7)
"""The longest time that ranks with nothing left to do wait; a rank that dies ends the wait: its connection breaks."""


def finish(
    trainer: Trainer, held_out: HeldOut | HeldOutSources | None, run: RunConfig, usage: Usage, *, is_over: bool
) -> HfdistError | None:
    """Evaluate, export, sample, draw and upload; give on rank 0 why the upload failed, if so. All ranks call it.

    A run that is not over, since a budget has stopped it, neither samples nor runs the harness: that takes long.
    """
    run_dir = Path(run.run.dir)
    logger.info("peak memory: %s", describe_peak_memory(trainer.args.device))
    reports = trainer.checkpointer.data_reports()
    for pool in reports:
        logger.info(
            "data %s: %.1f %% of the sequences, %s tokens, %.2f epochs; sequences filled to %.1f %%",
            *(pool.name, 100 * pool.share, f"{pool.tokens:,}", pool.epochs, 100 * pool.filled),
        )
    if trainer.is_world_process_zero():
        with warning_of_failure("report of the documents that were read"):
            lanes = [read_records(run_dir / LEDGER, lane) for lane in range(run.data.lanes)]
            if (losses := describe_losses(lanes, run.data)) is not None:
                logger.info("data: %s", losses)
    loss, step = None, trainer.state.global_step
    assert trainer.strategy is not None
    if held_out is not None:
        loss = trainer.checkpointer.last_held_out_loss()
        loss = float(trainer.evaluate()["eval_loss"]) if loss is None else loss
    if run.evaluate.export is Export.best:
        loss, step = _take_best(trainer, loss)
    patient = dist.new_group(backend="gloo", timeout=_LONGEST_WAIT) if dist.is_initialized() else None
    folder, not_uploaded = _deliver(trainer, run, patient), None
    usage.read()
    if trainer.is_world_process_zero():
        if held_out is not None and loss is not None:
            _log_held_out(loss, held_out, run)
        if is_over and (prompt := run.report.sample_prompt) is not None:
            with trainer.strategy.without_partitioning(trainer.args), warning_of_failure("sample"):
                logger.info("%s continues %r:\n%s", folder, prompt, sample(folder, prompt, run.report.sample_tokens))
        if run.report.plot:
            with warning_of_failure("picture of the losses"):
                logger.info("loss curve: %s", plot_losses(run_dir, run.task.name))
        with warning_of_failure("model card"):
            # A download lies in a folder of its commit's name.
            name = Path(getattr(trainer.model, "name_or_path", "")).name
            commit = name if re.fullmatch(r"[0-9a-f]{40}", name) else None
            write_card(folder, run, reports, Exported(step, loss, commit, usage.totals()), ranks=world_size())
        logger.info("used: %s", describe_usage(usage.totals(), run.cost))
        logger.info("model: %s", folder)
        not_uploaded = push(folder, run.export)
        if is_over and run.evaluate.lm_eval:
            _report_tasks(trainer, folder, run, step)
    if patient is not None:
        # Ranks that leave early would take the launcher down while rank 0 is still busy, which may last hours.
        dist.barrier(patient)
        if "nccl" in dist.get_backend():
            # Under gloo a rank now and then hangs here, while its peers take the same connections down: the end of the
            # process closes them as well.
            trainer.end()
    return not_uploaded


def _log_held_out(loss: float, held_out: HeldOut | HeldOutSources, run: RunConfig) -> None:
    if run.task.name.is_reinforcement:
        logger.info("held-out reward %.4f", 0.0 - loss)
        return
    if run.task.name is not TaskName.causal_lm:
        logger.info("held-out loss %.4f", loss)
        return
    logger.info("held-out loss %.4f, perplexity %.1f", loss, perplexity(loss))
    baseline = unigram_loss(held_out[k]["labels"] for k in range(len(held_out)))
    words = "a unigram model fitted to the same tokens: %.4f, perplexity %.1f"
    logger.info(words, baseline, perplexity(baseline))


@contextmanager
def warning_of_failure(what: str) -> Iterator[None]:
    """Log an error in place of raising it: the model is trained, and what fails now must not fail the run."""
    try:
        yield
    except Exception as error:
        logger.warning("no %s: %s: %s", what, type(error).__name__, error)


def describe_peak_memory(device: torch.device) -> str:
    """Give the most memory that each rank has used, such as `host 974, 932 MiB by rank`. A collective.

    Host memory is the process's largest resident size, pages of mapped files included.
    """
    peaks_bytes = largest_peaks(device)
    every = gather_json(peaks_bytes)
    parts = [f"{kind} {', '.join(f'{peaks[kind] / 2**20:,.0f}' for peaks in every)}" for kind in peaks_bytes]
    return f"{'; '.join(parts)} MiB by rank"


def _deliver(trainer: Trainer, run: RunConfig, patient: dist.ProcessGroup | None) -> Path:
    """Write the model, or the adapter and the model that it is merged into; give the folder that a user would open."""
    model, adapter = Path(run.run.dir) / MODEL, Path(run.run.dir) / ADAPTER
    if not run.adapter.is_used:
        trainer.save_model(str(model))
        return model
    trainer.save_model(str(adapter))
    logger.info("adapter: %s", adapter)
    if not run.adapter.merge:
        return adapter
    return model if on_rank_zero(lambda: _merge(trainer, run, adapter, model), patient) else adapter


def _merge(trainer: Trainer, run: RunConfig, adapter: Path, folder: Path) -> bool:
    model: Any = trainer.model
    assert trainer.strategy is not None
    # Where its weights were read from, and not the Hub, where a branch may have moved on since.
    base = replace(run.model, name=model.name_or_path, revision=None, gguf_file=None)
    with trainer.strategy.without_partitioning(trainer.args):
        return write_merged(
            adapter,
            folder,
            base=base,
            config=copy.deepcopy(model.config),
            generation=model.generation_config,
            tokenizer=trainer.processing_class,
        )


def _take_best(trainer: Trainer, last_loss: float | None) -> tuple[float | None, int]:
    """Put the weights of the best checkpoint into the model; give their held-out loss and step."""
    best, last_step = trainer.checkpointer.find_best(), trainer.state.global_step
    if best is None:
        logger.warning("no checkpoint was evaluated: the model is that of the last step")
        return last_loss, last_step
    path, loss = best
    if path.name == step_name(last_step) or (last_loss is not None and last_loss <= loss):
        logger.info("the best model is that of the last step")
        return last_loss, last_step
    logger.info("the best checkpoint is %s", path.name)
    trainer.checkpointer.restore_weights(path)
    return loss, int(path.name.removeprefix("step-"))


def _report_tasks(trainer: Trainer, folder: Path, run: RunConfig, step: int) -> None:
    """Let the harness measure the exported model; what fails there does not fail the run."""
    try:
        results = lm_eval.measure(folder, run, device=trainer.args.device)
        figures = lm_eval.figures(results)
        (Path(run.run.dir) / lm_eval.RESULTS).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    except (lm_eval.HarnessError, OSError, KeyError) as error:
        logger.warning("lm_eval: %s", error)
        return
    # The best model may be that of an earlier step than the line says.
    trainer.log({"lm_eval/step": step, **figures})
    logger.info("lm_eval:\n%s", lm_eval.table(figures))


def unigram_loss(sequences: Iterable[torch.Tensor]) -> float:
    """Entropy of the tokens in nats: the best that any model without context can do on these very tokens."""
    counts = torch.bincount(torch.cat([labels[labels >= 0] for labels in sequences])).double()
    share = counts[counts > 0] / counts.sum()
    return float(-(share * share.log()).sum())


def sample(folder: Path, prompt: str, num_tokens: int) -> str:
    """Open the exported folder as any user would, and let the model continue `prompt` (top-k sampling, fixed seed)."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        output = model.generate(
            **inputs,
            max_new_tokens=num_tokens,
            do_sample=True,
            top_k=40,
            temperature=0.8,
            use_cache=True,
            pad_token_id=tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
