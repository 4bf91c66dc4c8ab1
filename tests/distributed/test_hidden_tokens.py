"""Masked language models and span corruption: transformers' trainers on the same draws; the same in every layout."""

import itertools
import json

import pytest
import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from hfdist.config.task import Head, TaskName
from hfdist.run import prepare_run
from hfdist.testing import run_ranks
from hfdist.tune.masked import MaskedTokens
from hfdist.tune.span_corruption import SpanCorruption
from tests.distributed import pair_runs
from tests.distributed.encoder_runs import write_encoder
from tests.distributed.pair_runs import as_of_step_2, check_alike, difference, opened
from tests.distributed.preference_runs import EPSILON, GLOBAL_BATCH, RATE, STEPS, make_config, tune
from tests.distributed.runs import losses
from tests.distributed.trl_runs import WORDS
from tests.marks import many

pytestmark = pytest.mark.distributed

LENGTH = 32
COMMON = (f"data.sequence_length={LENGTH}", "data.too_long=split", *pair_runs.SAVES)
TASKS = {
    "bert": ("task=mlm", *COMMON),
    "roberta": ("task=mlm", *COMMON, "data.packing=none", "task.mlm_probability=0.3"),
    "modernbert": ("task=mlm", *COMMON, "data.packing=concat"),
    "distilbert": ("task=mlm", *COMMON),
    "t5": ("task=span_corruption", *COMMON),
    "bart": ("task=span_corruption", *COMMON, "data.packing=none", "task.noise_density=0.5"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    ends, positions = {"bos_token_id": 2, "eos_token_id": 3}, {"roberta": {"max_position_embeddings": LENGTH + 1}}
    return {
        kind: pair_runs.write_model(folder / kind, kind, num_sentinels=8)
        if kind in pair_runs.SHAPES
        else write_encoder(folder / kind, kind, head=Head.masked, **ends, **positions.get(kind, {}))
        for kind in TASKS
    }


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Documents of a word or more, some of them longer than a sequence."""
    path, generator = tmp_path_factory.mktemp("rows") / "rows.jsonl", torch.Generator().manual_seed(0)
    with path.open("w") as file:
        for number in range(60):
            length = int(torch.randint(1, 60 if number % 7 == 0 else 16, (), generator=generator))
            picks = torch.randint(len(WORDS), (length,), generator=generator)
            file.write(json.dumps({"text": " ".join(WORDS[pick] for pick in picks)}) + "\n")
    return path


@pytest.fixture(scope="module")
def single(tmp_path_factory, models, rows, cache_dir):
    folder, known = tmp_path_factory.mktemp("single"), {}

    def of(kind):
        if kind not in known:
            known[kind] = tune(folder / kind, models[kind], rows, 1, *TASKS[kind])
        return known[kind]

    return of


@pytest.mark.parametrize(
    ("kind", "layout", "num_ranks"),
    [
        ("bert", "zero3 train.micro_batch_size=1", 2),
        many("bert", "single train.micro_batch_size=1", 1),
        many("bert", "ddp", 2),
        many("roberta", "fsdp2 train.micro_batch_size=1", 2),
        many("modernbert", "zero2", 2),
        many("distilbert", "fsdp2 train.micro_batch_size=1", 4),
        many("t5", "fsdp2", 2),
        many("t5", "zero3 train.micro_batch_size=1", 2),
        many("bart", "ddp train.micro_batch_size=1", 4),
    ],
)
def test_a_layout_changes_nothing(single, tmp_path, models, rows, kind, layout, num_ranks):
    run = tune(tmp_path, models[kind], rows, num_ranks, *TASKS[kind], *f"strategy={layout}".split())
    check_alike(run, single(kind))
    assert len(set(losses(run))) == len(losses(run)) > 3


def test_a_run_goes_on_with_the_same_draws_in_another_layout(single, tmp_path, models, rows):
    run = tune(as_of_step_2(single("t5"), tmp_path), models["t5"], rows, 2, *TASKS["t5"], "strategy=fsdp2")
    check_alike(run, single("t5"))


def read_steps(config):
    """What the model reads of each step of a run, and its labels: lists of token ids by row, padded."""
    run = prepare_run(config)
    run.find_model()
    run.open_data()
    tokenizer, seed = run.data.tokenizer, config.train.seed
    if config.task.name is TaskName.mlm:
        objective = MaskedTokens(config.task, seed, tokenizer)
    else:
        objective = SpanCorruption(config.task, seed, tokenizer, LENGTH)
    batches, steps = iter(run.data.stream.at_beginning().loader(batch_size=GLOBAL_BATCH)), []
    for batch in itertools.islice(batches, STEPS):
        made = objective.prepare(batch)
        columns = (made[name].tolist() for name in ("input_ids", "attention_mask", "labels"))
        rows = zip(*columns, strict=True)
        steps.append([{"input_ids": ids, "attention_mask": mask, "labels": own} for ids, mask, own in rows])
    return steps


class InOrder(Trainer):
    """Reads a batch a step, of any number of rows."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)


def train_plainly(folder, start, auto, steps):
    """Train transformers' own class on the same rows, all of a step at once; give the losses, and the weights."""
    model = auto.from_pretrained(start, dtype=torch.float32)
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=1, max_steps=STEPS, learning_rate=RATE, use_cpu=True,
        lr_scheduler_type="constant", adam_epsilon=EPSILON, logging_steps=1, save_strategy="no", report_to=[],
        disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = InOrder(
        model, arguments, train_dataset=Dataset.from_list([{"rows": step} for step in steps]),
        data_collator=lambda batch: default_data_collator(batch[0]["rows"]),
    )  # fmt: skip
    trainer.train()
    found = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return found, {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["bert", "t5", many("roberta"), many("modernbert"), many("bart")])
def test_losses_and_weights_are_those_of_transformers(single, tmp_path, models, rows, kind):
    config = make_config(tmp_path / "read", models[kind], rows, *TASKS[kind])
    [steps] = run_ranks(read_steps, 1, config, group=False)
    run = single(kind)
    auto = AutoModelForSeq2SeqLM if kind in pair_runs.SHAPES else AutoModelForMaskedLM
    wanted, state = train_plainly(tmp_path / "plain", models[kind], auto, steps)
    assert losses(run) == pytest.approx(wanted, rel=1e-5)
    assert difference(opened(run), state) < 1e-5
