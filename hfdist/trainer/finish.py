"""The end of a run: held-out loss beside a baseline, the model as a Hub folder, a sample of it, a picture."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfdist.checkpoint.exchange import on_rank_zero
from hfdist.config.run import RunConfig
from hfdist.data import HeldOut
from hfdist.trainer.memory import describe_peak_memory
from hfdist.trainer.merged import without_zero3, write_merged
from hfdist.trainer.plot import plot_losses
from hfdist.trainer.saving import data_reports, last_held_out_loss
from hfdist.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

MODEL = "model"
ADAPTER = "adapter"


def finish(trainer: Trainer, held_out: HeldOut | None, run: RunConfig) -> None:
    """Evaluate, export, sample and draw. Call on all ranks; rank 0 reports."""
    run_dir = Path(run.run.dir)
    logger.info("peak memory: %s", describe_peak_memory(trainer.args.device))
    for pool in data_reports(trainer):
        logger.info(
            "data %s: %.1f %% of the sequences, %s tokens, %.2f epochs; sequences filled to %.1f %%",
            *(pool.name, 100 * pool.share, f"{pool.tokens:,}", pool.epochs, 100 * pool.filled),
        )
    loss = None if held_out is None else _last_held_out_loss(trainer)
    folder = _deliver(trainer, run)
    if trainer.is_world_process_zero():
        if held_out is not None and loss is not None:
            _report_loss(loss, unigram_loss(held_out[k]["labels"] for k in range(len(held_out))))
        if run.report.sample_prompt is not None:
            with without_zero3(trainer.args):
                _report_sample(folder, run.report.sample_prompt, run.report.sample_tokens)
        if run.report.plot:
            _report_losses(run_dir)
        logger.info("model: %s", folder)
    if dist.is_initialized():
        # Ranks that leave early would take the launcher down while rank 0 still samples.
        dist.barrier()
        if "nccl" in dist.get_backend():
            # Under gloo a rank now and then hangs here, while its peers take the same connections down: the end of the
            # process closes them as well.
            trainer.end()


def _deliver(trainer: Trainer, run: RunConfig) -> Path:
    """Write the model, or the adapter and the model that it is merged into; give the folder that a user would open."""
    model, adapter = Path(run.run.dir) / MODEL, Path(run.run.dir) / ADAPTER
    if not run.adapter.is_used:
        trainer.save_model(str(model))
        return model
    trainer.save_model(str(adapter))
    logger.info("adapter: %s", adapter)
    if not run.adapter.merge:
        return adapter
    return model if on_rank_zero(lambda: _merge(trainer, run, adapter, model)) else adapter


def _merge(trainer: Any, run: RunConfig, adapter: Path, model: Path) -> bool:
    with without_zero3(trainer.args):
        return write_merged(
            adapter,
            model,
            base=run.model,
            config=copy.deepcopy(trainer.model.config),
            generation=trainer.model.generation_config,
            tokenizer=trainer.processing_class,
        )


def _last_held_out_loss(trainer: Trainer) -> float:
    """The evaluation of the last step, made now unless it has been made."""
    last = last_held_out_loss(trainer)
    return float(trainer.evaluate()["eval_loss"]) if last is None else last


def _report_loss(loss: float, baseline: float) -> None:
    logger.info("held-out loss %.4f, perplexity %.1f", loss, _perplexity(loss))
    logger.info("a unigram model fitted to the same tokens: %.4f, perplexity %.1f", baseline, _perplexity(baseline))


def _report_losses(run_dir: Path) -> None:
    try:
        logger.info("loss curve: %s", plot_losses(run_dir))
    except OSError as error:
        # As with a sample: the model is exported.
        logger.warning("no picture of the losses: %s", error)


def _report_sample(folder: Path, prompt: str, num_tokens: int) -> None:
    try:
        logger.info("%s continues %r:\n%s", folder, prompt, sample(folder, prompt, num_tokens))
    except Exception as error:
        # The run is done and saved: whatever a model's own generation code raises must not make it a failure.
        logger.warning("no sample: %s: %s", type(error).__name__, error)


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


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
