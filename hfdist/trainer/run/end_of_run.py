"""The end of a run: held-out loss beside a baseline, the exported model with its card, what it can do, a picture."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator

from hfdist.checkpoint.folder import step_name
from hfdist.collectives import gather_json, world_size
from hfdist.config.model import Init
from hfdist.config.run import Export, RunConfig
from hfdist.config.task import TaskName
from hfdist.data import HeldOut, HeldOutSources, are_chats, count_trained, describe_losses
from hfdist.data.stream.ledger import read_records
from hfdist.errors import HfdistError
from hfdist.records import RunRecord
from hfdist.trainer.budget.usage import Usage
from hfdist.trainer.evaluation import lm_eval
from hfdist.trainer.export.deliver import deliver
from hfdist.trainer.export.model_card import Exported, write_card
from hfdist.trainer.export.push_to_hub import push
from hfdist.trainer.reporting.callbacks import plot_losses
from hfdist.trainer.reporting.peak_memory import largest_peaks
from hfdist.trainer.run.end_screen import Ending, describe_end
from hfdist.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

_LONGEST_WAIT = timedelta(days=7)
"""The longest time that ranks with nothing left to do wait; a rank that dies ends the wait: its connection breaks."""


def finish(
    trainer: Trainer, held_out: HeldOut | HeldOutSources | None, run: RunConfig, usage: Usage, *, stopped_by: str | None
) -> HfdistError | None:
    """Evaluate, export, sample, draw and upload; give on rank 0 why the upload failed, if so. All ranks call it.

    A run that is not over, since the budget `stopped_by` has stopped it, neither samples nor runs the harness: that
    takes long.
    """
    is_over = stopped_by is None
    peaks = gather_json(largest_peaks(trainer.args.device))
    reports = trainer.checkpointer.data_reports()
    loss, step = None, trainer.state.global_step
    assert trainer.strategy is not None
    if held_out is not None:
        loss = trainer.checkpointer.last_held_out_loss()
        loss = float(trainer.evaluate()["eval_loss"]) if loss is None else loss
    if run.evaluate.export is Export.best:
        loss, step = _take_best(trainer, loss)
    patient = dist.new_group(backend="gloo", timeout=_LONGEST_WAIT) if dist.is_initialized() else None
    folder, not_uploaded = deliver(trainer, run, patient), None
    usage.read()
    if trainer.is_world_process_zero():
        if is_over and (prompt := run.report.sample_prompt) is not None:
            with trainer.strategy.without_partitioning(trainer.args), warning_of_failure("sample"):
                logger.info("%s continues %r:\n%s", folder, prompt, sample(folder, prompt, run.report.sample_tokens))
        if run.report.plot:
            with warning_of_failure("picture of the losses"):
                plot_losses(run.run.folder, run.task.name)
        with warning_of_failure("model card"):
            # A download lies in a folder of its commit's name.
            name = Path(getattr(trainer.model, "name_or_path", "")).name
            commit = name if re.fullmatch(r"[0-9a-f]{40}", name) else None
            write_card(folder, run, reports, Exported(step, loss, commit, usage.totals()), ranks=world_size())
        not_uploaded = push(folder, run.export)
        if is_over and run.evaluate.lm_eval:
            _report_tasks(trainer, folder, run, step)
        with warning_of_failure("summary of the run"):
            found = {"loss": loss, "step": step, "pools": reports, "peak_bytes": peaks, "stopped_by": stopped_by}
            logger.info("%s", describe_end(_sum_up(trainer, held_out, run, usage.totals(), folder, **found)))
    if patient is not None:
        # Ranks that leave early would take the launcher down while rank 0 is still busy, which may last hours.
        dist.barrier(patient)
        if "nccl" in dist.get_backend():
            # Under gloo a rank now and then hangs here, while its peers take the same connections down: the end of the
            # process closes them as well.
            trainer.end()
    return not_uploaded


def _sum_up(
    trainer: Trainer,
    held_out: HeldOut | HeldOutSources | None,
    run: RunConfig,
    record: RunRecord,
    folder: Path,
    **found: Any,
) -> Ending:
    """Find on rank 0 what else the screen says."""
    assert trainer.strategy is not None
    assert trainer.engine is not None
    model: Any = trainer.engine.model
    stream: Any = trainer.train_dataset
    left_out, num_trained, graded = None, None, {}
    with warning_of_failure("report of the documents that were read"):
        lanes = [read_records(run.run.folder.ledger, lane) for lane in range(run.data.lanes)]
        left_out, num_trained = describe_losses(lanes, run.data), count_trained(lanes)
    with warning_of_failure("comparison with the plan"):
        graded = _read_grade(run.run.folder.grade) if run.report.plan else {}
    convention = trainer.weighted_loss.convention
    # Elsewhere the targets are no plain text, or the loss is no mean of them.
    is_comparable = run.model.init is Init.random and run.task.name is TaskName.causal_lm
    is_comparable = is_comparable and not stream.corpus.has_examples
    is_comparable = is_comparable and (convention is None or convention.is_of_tokens)
    baseline = None
    if held_out is not None and is_comparable:
        baseline = unigram_loss(held_out[k]["labels"] for k in range(len(held_out)))
    return Ending(
        config=run,
        record=record,
        layout=trainer.strategy.topology.describe(),
        model_type=model.config.model_type,
        num_parameters=trainer.engine.size.num_parameters,
        num_trained=trainer.engine.size.num_trained,
        folder=folder,
        loss_before=_loss_before(trainer.state.log_history),
        without_context=baseline,
        adapter_folder=run.run.folder.adapter if run.adapter.is_used else None,
        **_find_figures(trainer, held_out, found["step"]),
        left_out=left_out,
        num_documents=num_trained,
        graded=graded,
        is_chat=bool(getattr(trainer.processing_class, "chat_template", None)) and bool(are_chats(stream.corpus)),
        **found,
    )


def _loss_before(log_history: Sequence[Mapping[str, Any]]) -> float | None:
    return next(
        (float(entry["eval_loss"]) for entry in log_history if entry["step"] == 0 and "eval_loss" in entry), None
    )


def _find_figures(trainer: Trainer, held_out: HeldOut | HeldOutSources | None, step: int) -> dict[str, Any]:
    """Give what the task measures beside the loss."""
    # Of pairs, and of a reward model.
    figures = {
        "accuracy": ("eval_rewards/accuracies", "eval_accuracies"),
        "margin": ("eval_rewards/margins", "eval_margins"),
    }
    of_step = [entry for entry in reversed(trainer.state.log_history) if entry["step"] == step]
    found: dict[str, Any] = {
        name: next((float(entry[key]) for entry in of_step for key in keys if key in entry), None)
        for name, keys in figures.items()
    }
    found["cut_off"] = next(
        (entry["cut_off"] for entry in reversed(trainer.state.log_history) if "cut_off" in entry), None
    )
    rewards = [float(entry["reward"]) for entry in trainer.state.log_history if "reward" in entry]
    found["rewards"] = (rewards[0], rewards[-1]) if rewards else None
    objective = trainer.options.objective
    if objective is not None and held_out is not None and found["accuracy"] is not None:
        items = (default_data_collator([held_out[k]]) for k in range(len(held_out)))
        found["num_held_out"] = sum(int(objective.count(item)) for item in items)
    return found


def _read_grade(path: Path) -> dict[str, tuple[float, float]]:
    """Give what was planned and measured, by name; {}: this start has written no grade."""
    if not path.is_file():
        return {}
    items = json.loads(path.read_text(encoding="utf-8"))["items"]
    return {item["name"]: (item["predicted"], item["measured"]) for item in items}


@contextmanager
def warning_of_failure(what: str) -> Iterator[None]:
    """Log an error in place of raising it: the model is trained, and what fails now must not fail the run."""
    try:
        yield
    except Exception as error:
        logger.warning("no %s: %s: %s", what, type(error).__name__, error)


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
        run.run.folder.lm_eval.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
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
