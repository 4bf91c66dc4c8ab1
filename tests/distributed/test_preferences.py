"""Preference tuning: TRL's own losses and weights on one process, and the same in every layout."""

import shutil

import pytest

from hfdist.records import RunFolder, read_lines
from hfdist.testing import RankFailed, run_ranks
from tests.distributed import trl_runs
from tests.distributed.preference_runs import (
    STEPS,
    make_config,
    read_answers,
    save_start,
    train_plainly,
    tune,
    write_rows,
)
from tests.distributed.runs import eval_losses, losses, weights
from tests.marks import many

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    trl_runs.write_models(folder)
    return folder / "lm"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Of many lengths, so that sequences hold different numbers of answers."""
    folder = tmp_path_factory.mktemp("rows")
    return {kind: write_rows(folder / f"{kind}.jsonl", kind, (1, 9)) for kind in ("pairs", "unpaired")}


TASKS = {"dpo": "pairs", "kto": "unpaired", "reward": "pairs"}


@pytest.fixture(scope="module")
def single(tmp_path_factory, model, rows, cache_dir):
    folder = tmp_path_factory.mktemp("single")
    return {task: tune(folder / task, model, rows[kind], 1, f"task={task}") for task, kind in TASKS.items()}


def figures(folder, prefix=""):
    names = ("rewards/margins", "rewards/accuracies", "kl", "margins", "accuracies")
    lines = [line for line in read_lines(RunFolder(folder).metrics) if f"{prefix}loss" in line]
    return [line[f"{prefix}{name}"] for line in lines for name in names if f"{prefix}{name}" in line]


def check_equal(run, reference):
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5)
    assert eval_losses(run) == pytest.approx(eval_losses(reference), rel=1e-5)
    for prefix in ("", "eval_"):
        assert figures(run, prefix) == pytest.approx(figures(reference, prefix), rel=1e-3, abs=1e-5)
    assert trl_runs.difference(weights(run), weights(reference)) < 1e-5


@pytest.mark.parametrize(
    ("task", "strategy", "num_ranks"),
    [
        *(
            many("dpo", "zero3", 2),
            ("dpo", "pipeline strategy.schedule=zbv", 2),
            many("dpo", "3d train.micro_batch_size=1", 8),
            ("dpo", "fsdp2", 2),
        ),
        *(many("kto", "pipeline", 2), ("kto", "zero2", 2), many("kto", "tensor", 2), many("kto", "fsdp2", 2)),
        *(many("reward", "ddp", 2), ("reward", "pipeline", 2), many("reward", "zero3", 2), ("reward", "tensor", 2)),
        *(many("reward", "fsdp2 strategy.tensor=2", 4), many("kto", "pipeline_zero1 train.micro_batch_size=1", 4)),
    ],
)
def test_a_layout_changes_nothing(single, tmp_path, model, rows, task, strategy, num_ranks):
    run = tune(tmp_path, model, rows[TASKS[task]], num_ranks, f"task={task}", *f"strategy={strategy}".split())
    check_equal(run, single[task])
    assert len(set(losses(run))) == STEPS


# One pair fills a sequence, or four answers of equal lengths do: then a step's answers are a batch of TRL's.
PAIRS, ANSWERS = (11, 15), (8, 8)
ANSWER_TOKENS = 2 * ANSWERS[0] + 1
LIKE_TRL = {
    "sigmoid": ("dpo", {}),
    "robust": ("dpo", {"loss_type": "robust", "label_smoothing": 0.1}),
    "hinge": ("dpo", {"loss_type": "hinge"}),
    "ipo": ("dpo", {"loss_type": "ipo"}),
    "apo_zero": ("dpo", {"loss_type": "apo_zero"}),
    "apo_down": ("dpo", {"loss_type": "apo_down"}),
    "reward": ("reward", {}),
    "kto": ("kto", {"desirable_weight": 1.5}),
    "apo_zero_unpaired": ("kto", {"loss_type": "apo_zero_unpaired"}),
}


@pytest.mark.parametrize("name", [many(name) if name in ("hinge", "apo_zero") else name for name in LIKE_TRL])
def test_losses_and_weights_are_those_of_trl(tmp_path, model, cache_dir, name):
    task, arguments = LIKE_TRL[name]
    kind = TASKS[task]
    rows = write_rows(tmp_path / "rows.jsonl", kind, PAIRS if kind == "pairs" else ANSWERS)
    own = {key: value for key, value in arguments.items() if key != "loss_type"}
    if "loss_type" in arguments:
        own["loss"] = arguments["loss_type"]
    overrides = [f"task={task}", *(f"task.{key}={value}" for key, value in own.items())]
    if task == "kto":
        # kl is that of a step, and answers change places in a sequence.
        overrides += [
            "train.global_batch_size=1",
            "train.micro_batch_size=1",
            "data.lanes=1",
            f"data.sequence_length={4 * ANSWER_TOKENS}",
        ]
    run = tune(tmp_path / "ours", model, rows, 1, *overrides)
    config = make_config(tmp_path / "read", model, rows, *overrides)
    steps = run_ranks(read_answers, 1, config, group=False)[0]
    start = model
    if task == "reward":
        # The layer that scores, as the run drew it.
        start = tmp_path / "start"
        run_ranks(save_start, 1, start, config, group=False)
    [plain] = run_ranks(train_plainly, 1, tmp_path / "trl", model, start, task, steps, arguments, group=False)
    assert losses(run) == pytest.approx([line["loss"] for line in plain], rel=1e-5)
    lines = [line for line in read_lines(RunFolder(run).metrics) if "loss" in line]
    assert [line["grad_norm"] for line in lines] == pytest.approx([line["grad_norm"] for line in plain], rel=1e-4)
    assert trl_runs.difference(weights(run), weights(tmp_path / "trl")) < 1e-5


def test_a_run_goes_on_in_another_layout(single, tmp_path, model, rows):
    """The reference is that of the first start, though the weights have moved on."""
    saves = ("task=dpo", "checkpoint.every=2", "checkpoint.keep=9", "strategy=ddp")
    run = tune(tmp_path / "run", model, rows["pairs"], 2, *saves)
    before = {path: path.read_bytes() for path in (run / "reference").iterdir()}
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08}")
    shutil.rmtree(run / "model")
    tune(run, model, rows["pairs"], 2, *saves[:3], "strategy=pipeline")
    check_equal(run, single["dpo"])
    assert {path: path.read_bytes() for path in (run / "reference").iterdir()} == before


def test_a_resume_may_have_another_held_out_set(single, tmp_path, model, rows):
    saves = ("task=dpo", "checkpoint.every=2", "checkpoint.keep=9")
    run = tune(tmp_path / "run", model, rows["pairs"], 1, *saves, "data.eval_sequences=1")
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08}")
    shutil.rmtree(run / "model")
    tune(run, model, rows["pairs"], 1, *saves)
    assert eval_losses(run)[-1] == pytest.approx(eval_losses(single["dpo"])[-1], rel=1e-5)


def test_a_model_that_sees_through_packed_answers_is_refused(tmp_path, model, rows, cache_dir):
    small = ("hidden_size=16", "num_hidden_layers=2", "vocab_size=20", "state_size=4")
    overrides = (
        "model.init=random",
        "model.name=null",
        "model.type=mamba",
        f"model.tokenizer.name={model}",
        *(f"+model.config.{one}" for one in small),
    )
    with pytest.raises(RankFailed, match="sees through from one to the next"):
        tune(tmp_path, model, rows["pairs"], 1, "task=dpo", *overrides)
