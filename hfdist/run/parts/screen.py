"""What the screen at the end of a run says: found in the Trainer, and in the files of the run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import default_data_collator

from hfdist.config.model import Init
from hfdist.config.task import TaskName
from hfdist.data import are_chats, count_trained, describe_losses
from hfdist.data.stream.ledger import read_records
from hfdist.run.end_screen import describe_end
from hfdist.run.ending import Ending
from hfdist.run.parts.part import Part, warning_of_failure
from hfdist.run.parts.sample import held_out_example
from hfdist.run.state import RunState

logger = logging.getLogger(__name__)


class ScreenPart(Part):
    """Sums the run up."""

    def finish(self, run: RunState) -> None:
        """Log the screen."""
        with warning_of_failure("summary of the run"):
            logger.info("%s", describe_end(_sum_up(run)))


def _sum_up(run: RunState) -> Ending:
    """Find on rank 0 what the screen says."""
    config, data, trainer, found = run.config, run.data, run.trainer, run.outcome
    assert trainer.strategy is not None
    assert trainer.engine is not None
    model: Any = trainer.engine.model
    size = trainer.engine.size
    example = None
    with warning_of_failure("prompt of the held-out data"):
        example = held_out_example(run)
    left_out, num_trained, graded = None, None, {}
    with warning_of_failure("report of the documents that were read"):
        ledger = config.run.folder.ledger
        lanes = [read_records(ledger, lane) for lane in range(config.data.lanes)]
        left_out, num_trained = describe_losses(lanes, config.data), count_trained(lanes)
    with warning_of_failure("comparison with the plan"):
        graded = _read_grade(config.run.folder.grade) if config.report.plan else {}
    return Ending(
        config=config,
        record=run.usage.totals(),
        layout=trainer.strategy.topology.describe(),
        model_type=model.config.model_type,
        num_parameters=size.num_parameters,
        num_trained=size.num_trained,
        folder=found.folder,
        loss=found.loss,
        step=found.step,
        stopped_by=run.budget.stopped_by,
        pools=found.pools,
        peak_bytes=found.peak_bytes,
        loss_before=_loss_before(trainer.state.log_history),
        without_context=_find_baseline(run),
        adapter_folder=config.run.folder.adapter if config.adapter.is_used else None,
        **_find_figures(run),
        left_out=left_out,
        num_documents=num_trained,
        graded=graded,
        is_chat=bool(getattr(data.tokenizer, "chat_template", None)) and bool(are_chats(data.corpus)),
        sample_prompt=None if example is None else _text_of(run, example.prompt),
    )


def _text_of(run: RunState, ids: list[int]) -> str:
    return str(run.data.tokenizer.decode(ids, skip_special_tokens=True))


def _find_baseline(run: RunState) -> float | None:
    """Give the loss of a unigram model; None: the targets are no plain text, or the loss is no mean of them."""
    config, held_out, convention = run.config, run.data.held_out, run.trainer.weighted_loss.convention
    is_comparable = config.model.init is Init.random and config.task.name is TaskName.causal_lm
    is_comparable = is_comparable and not run.data.corpus.has_examples
    is_comparable = is_comparable and (convention is None or convention.is_of_tokens)
    if held_out is None or not is_comparable:
        return None
    return unigram_loss(held_out[k]["labels"] for k in range(len(held_out)))


def _loss_before(log_history: Sequence[Mapping[str, float]]) -> float | None:
    return next(
        (float(entry["eval_loss"]) for entry in log_history if entry["step"] == 0 and "eval_loss" in entry), None
    )


def _find_figures(run: RunState) -> dict[str, Any]:
    """Give what the task measures beside the loss."""
    # Of pairs, of a reward model, and of embeddings.
    figures = {
        "accuracy": ("eval_rewards/accuracies", "eval_accuracies"),
        "recall": ("eval_recall_at_1",),
        "reciprocal_rank": ("eval_mrr",),
        "margin": ("eval_rewards/margins", "eval_margins"),
    }
    history, held_out, objective = run.trainer.state.log_history, run.data.held_out, run.objective
    of_step = [entry for entry in reversed(history) if entry["step"] == run.outcome.step]
    found: dict[str, Any] = {
        name: next((float(entry[key]) for entry in of_step for key in keys if key in entry), None)
        for name, keys in figures.items()
    }
    for name in ("cut_off", "failed_episodes"):
        found[name] = next((entry[name] for entry in reversed(history) if name in entry), None)
    rewards = [float(entry["reward"]) for entry in history if "reward" in entry]
    found["rewards"] = (rewards[0], rewards[-1]) if rewards else None
    last = next((entry for entry in reversed(history) if "reward" in entry), {})
    names = [name for name in last if name.startswith("rewards/")]
    found["each_reward"] = {name.partition("/")[2]: float(last[name]) for name in names} if len(names) > 1 else {}
    # A penalty for leaving the reference teaches, too.
    teaches = run.config.task.beta or any(entry.get("reward_std") for entry in history)
    found["learns_nothing"] = bool(rewards) and not teaches
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


def unigram_loss(sequences: Iterable[torch.Tensor]) -> float:
    """Entropy of the tokens in nats: the best that any model without context can do on these very tokens."""
    counts = torch.bincount(torch.cat([labels[labels >= 0] for labels in sequences])).double()
    share = counts[counts > 0] / counts.sum()
    return float(-(share * share.log()).sum())
