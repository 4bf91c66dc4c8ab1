"""The whole Trainer with a pipeline under it, from Python, without Hydra and on a user's own dataset."""

import json

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, EarlyStoppingCallback, TrainerCallback, TrainingArguments

import hfdist
from hfdist.config.strategy import Schedule
from hfdist.errors import ConfigError, DataError, PartitionError
from hfdist.records import RunFolder
from hfdist.run.callbacks.metrics import TimelineWriter
from hfdist.testing import run_ranks
from hfdist.trainer.fault_tolerance.bit_comparison import find_differences
from tests.distributed.trainers import on_ranks
from tests.marks import many

pytestmark = pytest.mark.distributed

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 64}  # fmt: skip


def items(number):
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 64, (16,), generator=generator) for _ in range(number)]
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


def make_trainer(folder, pipeline, *, callbacks=(), frozen=(), layout=None, arguments=None, dropout=0.0, **more):
    sizes = {"global_batch_size": 4, "micro_batch_size": 1, "sequence_length": 16}
    strategy = hfdist.make_strategy(pipeline=pipeline, **sizes, **(layout or {}))
    fields = {"num_train_epochs": 2, "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none", "use_cpu": True,
              "save_strategy": "no", "disable_tqdm": True, "eval_strategy": "steps", "eval_steps": 1,
              "metric_for_best_model": "eval_loss", "greater_is_better": False}  # fmt: skip
    arguments = TrainingArguments(str(folder), **fields | (arguments or {}) | strategy.training_arguments())
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", attention_dropout=dropout, **TINY))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)))
    data = items(10)
    return hfdist.Trainer(
        model, arguments, strategy=strategy, train_dataset=data, eval_dataset=data[:3], callbacks=[*callbacks], **more
    )


def train(folder, pipeline):
    trainer = make_trainer(folder, pipeline)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    keys = ("step", "loss", "grad_norm", "eval_loss", "eval_tokens", "learning_rate", "tokens", "total_flos")
    history = [{key: entry[key] for key in keys if key in entry} for entry in trainer.state.log_history]
    trainer.save_model(str(folder / "model"))
    return before, history


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """On one process and on two ranks: what each rank has logged, and the exported models."""
    folders = {size: tmp_path_factory.mktemp(f"ranks{size}") for size in (1, 2)}
    logged = {size: run_ranks(train, size, folders[size], size, group=size > 1) for size in folders}
    models = {size: AutoModelForCausalLM.from_pretrained(folder / "model") for size, folder in folders.items()}
    return logged, models


def compare_ends():
    strategy = hfdist.make_strategy(pipeline=2, global_batch_size=2, micro_batch_size=1, sequence_length=16)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", tie_word_embeddings=True, **TINY))
    engine = strategy.build(model)
    equal = find_differences(engine.whole_parameters())
    with torch.no_grad():
        engine.model.get_parameter("model.embed_tokens.weight")[3, 4] += dist.get_rank()
    return equal, find_differences(engine.whole_parameters())


def test_a_head_that_is_no_longer_its_embedding_shows():
    for equal, (line,) in run_ranks(compare_ends, 2):
        assert equal == []
        assert line.startswith("model.embed_tokens.weight of pipeline ranks 0, 1: rank 0 on ")


def test_it_logs_and_evaluates_as_one_process_does(both):
    (reference,), ranks = both[0][1], both[0][2]
    assert ranks[0] == ranks[1], "every rank logs the same numbers"
    assert ranks[0][0] == pytest.approx(reference[0], rel=1e-6), "an evaluation before training"
    # 10 items in batches of 4: the last step of each epoch has 2.
    assert [entry["tokens"] for entry in reference[1] if "loss" in entry] == [64, 128, 160, 224, 288, 320]
    for ours, theirs in zip(ranks[0][1], reference[1], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_the_export_is_one_models(both):
    reference = dict(both[1][1].named_parameters())
    ours = dict(both[1][2].named_parameters())
    assert ours.keys() == reference.keys()
    for name, tensor in reference.items():
        assert torch.allclose(ours[name], tensor, rtol=1e-5, atol=1e-6), name


@on_ranks(2)
def test_early_stopping_stops_all_ranks(tmp_path):
    impatient = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=9)
    trainer = make_trainer(tmp_path, 2, callbacks=[impatient])
    trainer.train()
    assert trainer.state.global_step == 2


@on_ranks(2)
def test_what_needs_logits_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, 2)
    for wish in (lambda: trainer.predict(items(2)), lambda: make_trainer(tmp_path, 2, compute_metrics=len)):
        with pytest.raises(ConfigError, match="needs the logits") as refused:
            wish()
        assert refused.value.where == "make_strategy(pipeline, context)"
    with pytest.raises(PartitionError, match="cannot be called by itself"):
        trainer.model(input_ids=items(1)[0]["input_ids"][None])


def train_and_record(folder):
    trainer = make_trainer(folder, 2)
    trainer.add_callback(TimelineWriter(RunFolder(folder), trainer.engine))
    trainer.train()
    return trainer.engine.schedule_trace.title


def test_the_measured_schedule_is_written(tmp_path):
    titles = run_ranks(train_and_record, 2, tmp_path)
    assert titles == ["1f1b: 2 ranks x 1 stage, 4 micro batches"] * 2
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    for rank in (0, 1):
        of_rank = [event["cat"] for event in events if event["ph"] == "X" and event["tid"] == rank]
        assert of_rank.count("forward") == of_rank.count("backward") == 4


@pytest.mark.parametrize(
    ("layout", "word"),
    [
        ({"pipelin": 2}, "pipelin"),
        ({"pipeline": 2, "sharding": "zero2"}, 'sharding="zero1"'),
        ({"pipeline": 2, "schedule": "2f2b"}, "1f1b"),
    ],
)
def test_a_layout_from_python_is_checked_as_one_from_yaml(layout, word):
    with pytest.raises(ConfigError, match=word):
        hfdist.make_strategy(global_batch_size=4, **layout)


FROZEN = ("model.embed_tokens", "model.layers.0.", "model.layers.1.")


def train_frozen(folder, cases):
    """Losses and norms by case: the first stages have nothing to train, or train without an input gradient."""
    seen = {}
    for schedule, num_frozen in cases:
        layout = {} if schedule is None else {"schedule": schedule}
        arguments = {"max_steps": 2, "eval_strategy": "no"}
        pipeline = 1 if schedule is None else 2
        trainer = make_trainer(folder, pipeline, frozen=FROZEN[:num_frozen], layout=layout, arguments=arguments)
        trainer.train()
        # It has chosen one, the same on both ranks: else they would wait for each other.
        assert schedule is None or trainer.training.strategy.config.schedule is not Schedule.auto
        lines = [entry for entry in trainer.state.log_history if "loss" in entry]
        seen[schedule, num_frozen] = [(line["loss"], line["grad_norm"]) for line in lines]
    return seen


# With three the first of two ranks has nothing to train; where it has a later stage as well, it has.
FROZEN_CASES = [("auto", 3), ("interleaved_zero_bubble", 3), ("dualpipev", 3), ("1f1b", 2)]
MORE_FROZEN_CASES = [*((schedule.value, 3) for schedule in Schedule), ("zbv", 2)]


@pytest.mark.parametrize(
    "cases", [FROZEN_CASES, many([case for case in MORE_FROZEN_CASES if case not in FROZEN_CASES])]
)
def test_frozen_lower_blocks_change_nothing_under_any_schedule(tmp_path, cases):
    reference = run_ranks(train_frozen, 1, tmp_path, [(None, 2), (None, 3)], group=False)[0]
    for ours in run_ranks(train_frozen, 2, tmp_path, cases):
        for case, lines in ours.items():
            assert len(lines) == 2
            assert torch.tensor(lines) == pytest.approx(torch.tensor(reference[None, case[1]]), rel=1e-5), case


@on_ranks(2)
def test_what_would_train_wrongly_is_refused(tmp_path):
    for more, where in (
        ({"arguments": {"save_only_model": True}}, "args.save_only_model"),
        ({"optimizers": (torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]), None)}, "optimizers"),
        ({"pipeline": 1, "layout": {"data": 2, "sharding": "zero1"}, "arguments": {"max_grad_norm": 0.5}},
         "args.max_grad_norm"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as refused:
            make_trainer(tmp_path, **{"pipeline": 2} | more)
        assert refused.value.where == where
    trainer = make_trainer(tmp_path, 2)
    if dist.get_rank():
        trainer.model.model.norm.requires_grad_(False)
    with pytest.raises(PartitionError, match="frozen or unfrozen"):
        trainer.train()
    trainer = make_trainer(tmp_path, 2)
    trainer.train_dataset = items(10)[dist.get_rank() :]
    with pytest.raises(DataError, match="different batches"):
        trainer.train()


@on_ranks(2)
def test_dropout_goes_on_where_it_was(tmp_path):
    """In the middle of an epoch of a shuffled dataset, and after a callback has switched it off in a part."""

    class SwitchesOff(TrainerCallback):
        def on_step_begin(self, args, state, control, *, model, **named):
            list(model.modules())[-1].eval()

        def on_step_end(self, args, state, control, *, model, **named):
            assert all(module.training for module in model.modules())

    losses = []
    for name, checkpoint in (("whole", None), ("resumed", str(tmp_path / "whole" / "checkpoint-3"))):
        arguments = {"max_steps": 5, "eval_strategy": "no", "save_strategy": "steps", "save_steps": 3}
        trainer = make_trainer(tmp_path / name, 2, arguments=arguments, dropout=0.2, callbacks=[SwitchesOff()])
        trainer.train(resume_from_checkpoint=checkpoint)
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    whole, resumed = losses
    assert resumed[-2:] == pytest.approx(whole[-2:], rel=1e-6)
    assert len(whole) == 5
