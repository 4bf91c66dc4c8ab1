"""The part of a run that logs the screen at its end, from what the Trainer and the files of the run say."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import default_data_collator

from hfdist.config.model import Init
from hfdist.config.task import TaskName
from hfdist.data import are_chats, count_trained, describe_losses
from hfdist.data.stream.ledger import read_records
from hfdist.run.end_screen import describe_end
from hfdist.run.ending import Ending, PlannedAndMeasured
from hfdist.run.parts.part import Part, warning_of_failure
from hfdist.run.parts.sample import held_out_example
from hfdist.run.state import RunState

logger = logging.getLogger(__name__)


class ScreenPart(Part):
    """Logs the screen that sums the run up."""

    def finish(self, run: RunState) -> None:
        """Log the screen."""
        with warning_of_failure("summary of the run"):
            logger.info("%s", describe_end(_sum_up(run)))


def _sum_up(run: RunState) -> Ending:
    """Collect what the screen says, on rank 0; what cannot be found is left out with a warning."""
    config, data, trainer, outcome = run.config, run.data, run.trainer, run.outcome
    assert trainer.engine is not None
    example, left_out, num_documents, graded = None, None, None, {}
    with warning_of_failure("prompt of the held-out data"):
        example = held_out_example(run)
    with warning_of_failure("report of the documents that were read"):
        lanes = [read_records(config.run.folder.ledger, lane) for lane in range(config.data.lanes)]
        left_out, num_documents = describe_losses(lanes, config.data), count_trained(lanes)
    with warning_of_failure("comparison with the plan"):
        graded = _read_grade(config.run.folder.grade) if config.report.plan else {}
    ending = Ending(
        config=config,
        record=run.usage.totals(),
        layout=run.topology.describe(),
        model_type=run.model.config.model_type,
        num_parameters=trainer.engine.size.num_parameters,
        num_trained=trainer.engine.size.num_trained,
        folder=outcome.folder,
        loss=outcome.loss,
        step=outcome.step,
        stopped_by=run.budget.stopped_by,
        pools=outcome.pools,
        peak_bytes=outcome.peak_bytes,
        loss_before=_loss_before(trainer.state.log_history),
        without_context=_find_baseline(run),
        adapter_folder=config.run.folder.adapter if config.adapter.is_used else None,
        left_out=left_out,
        num_documents=num_documents,
        graded=graded,
        is_chat=bool(getattr(data.tokenizer, "chat_template", None)) and bool(are_chats(data.corpus)),
        sample_prompt=None if example is None else _text_of(run, example.prompt),
    )
    return _with_rewards(_with_figures(ending, run), trainer.state.log_history)


def _text_of(run: RunState, ids: list[int]) -> str:
    """Turn tokens into text."""
    return str(run.data.tokenizer.decode(ids, skip_special_tokens=True))


def _find_baseline(run: RunState) -> float | None:
    """Give the loss of a unigram model; None: the targets are no plain text, or the loss is no mean of them."""
    config, held_out, convention = run.config, run.data.held_out, run.trainer.weighted_loss.convention
    is_plain_text = config.task.name is TaskName.causal_lm and not run.data.corpus.has_examples
    is_mean_of_tokens = convention is None or convention.is_of_tokens
    # A pretrained model is better from the first step on.
    is_new = config.model.init is Init.random
    if held_out is None or not (is_new and is_plain_text and is_mean_of_tokens):
        return None
    return unigram_loss(held_out[k]["labels"] for k in range(len(held_out)))


def _loss_before(log_history: Sequence[Mapping[str, float]]) -> float | None:
    """Give the held-out loss before the first step; None: it was not measured."""
    for entry in log_history:
        if entry["step"] == 0 and "eval_loss" in entry:
            return float(entry["eval_loss"])
    return None


def _with_figures(ending: Ending, run: RunState) -> Ending:
    """Add the figures of pairs, of a reward model or of embeddings, from the evaluation of the exported weights."""
    entries = [entry for entry in reversed(run.trainer.state.log_history) if entry["step"] == ending.step]

    def find(*keys: str) -> float | None:
        return next((float(entry[key]) for entry in entries for key in keys if key in entry), None)

    accuracy, num_held_out = find("eval_rewards/accuracies", "eval_accuracies"), None
    objective, held_out = run.objective, run.data.held_out
    if objective is not None and held_out is not None and accuracy is not None:
        items = (default_data_collator([held_out[k]]) for k in range(len(held_out)))
        num_held_out = sum(int(objective.count(item)) for item in items)
    return replace(
        ending,
        accuracy=accuracy,
        num_held_out=num_held_out,
        recall=find("eval_recall_at_1"),
        reciprocal_rank=find("eval_mrr"),
        margin=find("eval_rewards/margins", "eval_margins"),
    )


def _with_rewards(ending: Ending, log_history: Sequence[Mapping[str, float]]) -> Ending:
    """Add the rewards of the answers, where the task rewards them."""
    lines = [entry for entry in log_history if "reward" in entry]
    if not lines:
        return ending
    first, last = lines[0], lines[-1]
    prefix = "rewards/"
    each = {name.removeprefix(prefix): float(value) for name, value in last.items() if name.startswith(prefix)}

    def newest(key: str) -> float | None:
        return next((entry[key] for entry in reversed(log_history) if key in entry), None)

    # A penalty for leaving the reference teaches, too.
    teaches = ending.config.task.beta or any(entry.get("reward_std") for entry in log_history)
    return replace(
        ending,
        rewards=(float(first["reward"]), float(last["reward"])),
        each_reward=each if len(each) > 1 else {},
        learns_nothing=not teaches,
        cut_off=newest("cut_off"),
        failed_episodes=newest("failed_episodes"),
    )


def _read_grade(path: Path) -> dict[str, PlannedAndMeasured]:
    """Give each figure's planned and measured value, by its name; {}: this start has written no grade."""
    if not path.is_file():
        return {}
    items = json.loads(path.read_text(encoding="utf-8"))["items"]
    return {item["name"]: PlannedAndMeasured(item["predicted"], item["measured"]) for item in items}


def unigram_loss(sequences: Iterable[torch.Tensor]) -> float:
    """Give the entropy of the tokens in nats: the lowest loss of any model without context on these very tokens.

    Labels below 0 are no targets.
    """
    counts = torch.bincount(torch.cat([labels[labels >= 0] for labels in sequences])).double()
    share = counts[counts > 0] / counts.sum()
    return float(-(share * share.log()).sum())
