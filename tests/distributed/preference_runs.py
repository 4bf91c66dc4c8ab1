"""Preference tuning on forked ranks, and TRL's trainers on the same answers in the same order."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
import trl
from datasets import Dataset
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from hfdist.config.composition.compose import compose_config
from hfdist.data.packing.sequence import IGNORED
from hfdist.run import prepare_run
from hfdist.testing import run_ranks
from recipes.tune import main
from tests.distributed.trl_runs import QUIET, WORDS

STEPS, GLOBAL_BATCH, LENGTH = 4, 4, 64
RATE = 2e-3
EPSILON = 1e-4
"""Of Adam: so large that gradients of nearly nothing, which are rounding, do not become whole steps."""
PLAIN = {
    **QUIET,
    "max_steps": STEPS,
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "adam_beta2": 0.999,
    "adam_epsilon": EPSILON,
}
"""Arguments by which TRL's classes train as the runs do."""
COMMON = (
    "model.init=pretrained",
    "data=files",
    f"data.sequence_length={LENGTH}",
    "data.lanes=4",
    "data.eval_fraction=0.2",
    "data.workers=0",
    "train.epochs=null",
    f"train.max_steps={STEPS}",
    f"train.global_batch_size={GLOBAL_BATCH}",
    "train.micro_batch_size=2",
    f"train.eval_every={STEPS // 2}",
    f"optimizer.lr={RATE}",
    "optimizer.schedule=constant",
    f"optimizer.eps={EPSILON}",
    "checkpoint=none",
    "checkpoint.keep_best=false",
    "report=quiet",
)


def write_rows(path: Path, kind: str, lengths: tuple[int, int], num_rows: int = 60) -> Path:
    """Rows of words; prompts and answers have from `lengths[0]` to `lengths[1]` of them."""
    generator = torch.Generator().manual_seed(0)

    def say() -> str:
        length = int(torch.randint(lengths[0], lengths[1] + 1, (), generator=generator))
        return " ".join(WORDS[pick] for pick in torch.randint(len(WORDS), (length,), generator=generator))

    with path.open("w") as file:
        for number in range(num_rows):
            row = {"prompt": f"{say()} "}
            if kind == "unpaired":
                row |= {"completion": say(), "label": number % 3 > 0}
            else:
                row |= {"chosen": say(), "rejected": say()}
            file.write(json.dumps(row) + "\n")
    return path


def tune(folder: Path, model: Path, rows: Path, num_ranks: int, *overrides: str) -> Path:
    """Run the recipe with `COMMON` and `overrides`, and give its folder."""
    run_ranks(main.__wrapped__, num_ranks, make_config(folder, model, rows, *overrides), group=num_ranks > 1)
    return folder


def make_config(folder: Path, model: Path, rows: Path, *overrides: str):
    """The run's config."""
    own = (
        f"model.name={model}",
        f"model.tokenizer.name={model}",
        f"data.sources.files.path={rows}",
        f"run.dir={folder}",
    )
    return compose_config([*COMMON, *own, *overrides], name="tune")


def read_answers(config) -> list[list[tuple[list[int], list[int], bool]]]:
    """For each step of a run: prompts, answers, and whether these are rejected, in order."""
    run = prepare_run(config)
    run.find_model()
    run.open_data()
    steps = []
    batches = iter(run.data.stream.at_beginning().loader(batch_size=config.train.global_batch_size))
    for _ in range(STEPS):
        batch, found = next(batches), []
        # A row without positions is one document.
        batch.setdefault("position_ids", torch.arange(batch["labels"].shape[1]).expand_as(batch["labels"]))
        for ids, labels, positions in zip(*(batch[k] for k in ("input_ids", "labels", "position_ids")), strict=True):
            starts = [*torch.nonzero(positions == 0)[:, 0].tolist(), len(ids)]
            for start, stop in itertools.pairwise(starts):
                targets = torch.nonzero(labels[start:stop] != IGNORED)[:, 0]
                if len(targets):
                    first = start + int(targets[0])
                    is_rejected = bool(labels[first] < IGNORED)
                    found.append((ids[start:first].tolist(), ids[first:stop].tolist(), is_rejected))
        steps.append(found)
    return steps


def save_start(folder: Path, config) -> None:
    """Write the model that a run begins with."""
    run = prepare_run(config)
    run.find_model()
    run.open_data()
    run.start_ranks()
    run.build_model()
    run.model.save_pretrained(folder)


class OddsRatioOfPaper(ORPOTrainer):
    """TRL's, but the loss of next tokens is that of the chosen answers, without their prompts."""

    def concatenated_forward(self, model, batch):
        chosen, rejected, chosen_logits, rejected_logits, _ = super().concatenated_forward(model, batch)
        labels = batch["chosen_labels"][:, 1:]
        loss = cross_entropy(chosen_logits[:, : labels.shape[1]].flatten(0, 1), labels.flatten())
        return chosen, rejected, chosen_logits, rejected_logits, loss


TRAINERS = {
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "cpo": (CPOTrainer, CPOConfig),
    "orpo": (OddsRatioOfPaper, ORPOConfig),
    "kto": (trl.KTOTrainer, trl.KTOConfig),
    "reward": (trl.RewardTrainer, trl.RewardConfig),
}


def train_plainly(folder: Path, model: Path, start: Path, task: str, steps: list, arguments: dict) -> list[dict]:
    """Train TRL's class on the answers of each step, at once; give its lines, and leave the model in the folder."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    answers = [answer for step in steps for answer in step]

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    if task == "kto":
        rows = [{"prompt": f"{text(p)} ", "completion": text(a), "label": not no} for p, a, no in answers]
    else:
        pairs = zip(answers[::2], answers[1::2], strict=True)
        rows = [{"prompt": f"{text(p)} ", "chosen": text(a), "rejected": text(b)} for (p, a, _), (_, b, _) in pairs]
    trainer, config = TRAINERS[task]
    fields = {
        **PLAIN,
        "output_dir": str(folder),
        "per_device_train_batch_size": len(rows) // STEPS,
        "train_sampling_strategy": "sequential",
    }
    kind = AutoModelForSequenceClassification if task == "reward" else AutoModelForCausalLM
    own = trainer(
        kind.from_pretrained(start, dtype="float32"),
        args=config(**fields, **arguments),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    own.train()
    own.save_model(str(folder / "model"))
    return [line for line in own.state.log_history if "loss" in line]
