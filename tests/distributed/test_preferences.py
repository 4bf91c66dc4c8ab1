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
from tests.marks import always, chosen, many

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    has_four_stages = any("zbv" in one for one in chosen(request, "strategy"))
    trl_runs.write_models(folder, num_hidden_layers=4 if has_four_stages else 2)
    return folder / "lm"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Of many lengths, so that sequences hold different numbers of answers."""
    folder = tmp_path_factory.mktemp("rows")
    return {kind: write_rows(folder / f"{kind}.jsonl", kind, (1, 9)) for kind in ("pairs", "unpaired")}


TASKS = {"dpo": "pairs", "orpo": "pairs", "kto": "unpaired", "reward": "pairs"}
DPO = ("task=dpo", "task.nll_weight=0.2")
"""With the loss of next tokens, which is divided by another number."""


@pytest.fixture(scope="module")
def single(tmp_path_factory, model, rows, cache_dir):
    folder = tmp_path_factory.mktemp("single")
    return {task: tune(folder / task, model, rows[kind], 1, *of_task(task)) for task, kind in TASKS.items()}


def of_task(task):
    return DPO if task == "dpo" else (f"task={task}",)


def figures(folder, prefix=""):
    names = ("rewards/margins", "rewards/accuracies", "nll", "kl", "margins", "accuracies")
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
            many("dpo", "pipeline strategy.schedule=zbv", 2),
            many("dpo", "3d train.micro_batch_size=1", 8),
            ("dpo", "fsdp2", 2),
        ),
        *(many("orpo", "zero2 train.micro_batch_size=1", 2), many("orpo", "pipeline", 2), ("orpo", "tensor", 2)),
        *(many("kto", "pipeline", 2), ("kto", "zero2", 2), many("kto", "tensor", 2), many("kto", "fsdp2", 2)),
        *(many("reward", "ddp", 2), ("reward", "pipeline", 2), many("reward", "zero3", 2), many("reward", "tensor", 2)),
        *(many("reward", "fsdp2 strategy.tensor=2", 4), many("kto", "pipeline_zero1 train.micro_batch_size=1", 4)),
    ],
)
def test_a_layout_changes_nothing(single, tmp_path, model, rows, task, strategy, num_ranks):
    run = tune(tmp_path, model, rows[TASKS[task]], num_ranks, *of_task(task), *f"strategy={strategy}".split())
    check_equal(run, single[task])
    assert len(set(losses(run))) == STEPS
    assert (run / "reference").is_dir() == (task in ("dpo", "kto"))


# One pair fills a sequence, or four answers of equal lengths do: then a step's answers are a batch of TRL's.
PAIRS, ANSWERS = (11, 15), (8, 8)
ANSWER_TOKENS = 2 * ANSWERS[0] + 1
PLAIN_DPO = ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "discopop", "apo_zero", "apo_down")
LIKE_TRL = {
    **{loss: (f"dpo task.loss={loss}", "dpo", {"loss_type": loss}) for loss in PLAIN_DPO},
    **{
        loss: (f"dpo task.loss={loss} task.label_smoothing=0.1", "dpo", {"loss_type": loss, "label_smoothing": 0.1})
        for loss in ("robust", "exo_pair")
    },
    "sigmoid_norm with nll": (
        "dpo task.loss=sigmoid_norm task.beta=0.5 task.nll_weight=0.2",
        "dpo",
        {"loss_type": ["sigmoid_norm", "sft"], "loss_weights": [1.0, 0.2], "beta": 0.5},
    ),
    **{f"cpo, {loss}": (f"cpo task.loss={loss}", "cpo", {"loss_type": loss}) for loss in ("sigmoid", "hinge", "ipo")},
    "a reference that follows": (
        "dpo task.ref_model_sync_steps=2 task.ref_model_mixup_alpha=0.7",
        "dpo",
        {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.7},
    ),
    "simpo": ("simpo", "cpo", {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0}),
    "orpo": ("orpo", "orpo", {}),
    "reward": ("reward", "reward", {}),
    "kto": ("kto task.desirable_weight=1.5", "kto", {"desirable_weight": 1.5}),
    "apo_zero_unpaired": ("kto task.loss=apo_zero_unpaired", "kto", {"loss_type": "apo_zero_unpaired"}),
}
# Between them they have all that is not one function of scores, which test_pair_losses.py knows.
USUAL = ("sigmoid_norm with nll", "a reference that follows", "orpo", "reward", "kto")
FIGURES = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "grad_norm")


def train_on_answers(folder, model, config, task, arguments):
    """Train TRL's class on what a run reads."""
    steps, start = read_answers(config), model
    if task == "reward":
        # The layer that scores, as the run drew it.
        start = folder / "start"
        save_start(start, config)
    return train_plainly(folder / "trl", model, start, task, steps, arguments)


@pytest.mark.parametrize("case", always(USUAL, LIKE_TRL))
def test_losses_and_weights_are_those_of_trl(tmp_path, model, cache_dir, case):
    own, task, arguments = case
    kind = "unpaired" if task == "kto" else "pairs"
    rows = write_rows(tmp_path / "rows.jsonl", kind, PAIRS if kind == "pairs" else ANSWERS)
    overrides = f"task={own}".split()
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
    [plain] = run_ranks(train_on_answers, 1, tmp_path, model, config, task, arguments, group=False)
    assert losses(run) == pytest.approx([line["loss"] for line in plain], rel=1e-5)
    lines = [line for line in read_lines(RunFolder(run).metrics) if "loss" in line]
    for name in FIGURES if kind == "pairs" and task != "reward" else ("grad_norm",):
        assert [line[name] for line in lines] == pytest.approx([line[name] for line in plain], rel=1e-4, abs=1e-5), name
    assert trl_runs.difference(weights(run), weights(tmp_path / "trl")) < 1e-5


def test_a_run_goes_on_in_another_layout(single, tmp_path, model, rows):
    """The reference is that of the first start, though the weights have moved on."""
    saves = (*DPO, "checkpoint.every=2", "checkpoint.keep=9")
    run = tune(tmp_path / "run", model, rows["pairs"], 2, *saves, "strategy=ddp")
    before = {path: path.read_bytes() for path in (run / "reference").iterdir()}
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08}")
    shutil.rmtree(run / "model")
    tune(run, model, rows["pairs"], 2, *saves, "strategy=pipeline")
    check_equal(run, single["dpo"])
    assert {path: path.read_bytes() for path in (run / "reference").iterdir()} == before


@pytest.mark.parametrize(
    ("first", "second"), [many("fsdp2", "pipeline"), many("tensor", "zero3"), many("zero2", "ddp")]
)
def test_a_reference_that_follows_the_model_is_in_checkpoints(tmp_path, model, rows, cache_dir, first, second):
    """The second move of the reference is after the checkpoint from which the run goes on in another layout."""
    own = (*DPO, "task.ref_model_sync_steps=1", "task.ref_model_mixup_alpha=0.3", "checkpoint.every=2")
    saves = (*own, "checkpoint.keep=9")
    reference = tune(tmp_path / "single", model, rows["pairs"], 1, *saves)
    run = tune(tmp_path / "run", model, rows["pairs"], 2, *saves, f"strategy={first}")
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08}")
    shutil.rmtree(run / "model")
    tune(run, model, rows["pairs"], 2, *saves, f"strategy={second}")
    check_equal(run, reference)
    assert not (run / "reference").exists()


def test_a_resume_may_have_another_held_out_set(single, tmp_path, model, rows):
    saves = (*DPO, "checkpoint.every=2")
    first = (f"train.max_steps={STEPS // 2}", "data.eval_sequences=1")
    run = tune(tmp_path / "run", model, rows["pairs"], 1, *saves, *first)
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
