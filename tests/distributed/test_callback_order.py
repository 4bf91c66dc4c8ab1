"""The order of a run's callbacks, which is law: each comes after those whose decisions and files it takes."""

import pytest
import transformers
from transformers import TrainerCallback, TrainingArguments

import hfdist
from hfdist.config.composition.compose import compose_config
from hfdist.testing import run_ranks
from tests.distributed import policy_runs
from tests.distributed.preference_runs import make_config
from tests.distributed.runs import SMALL
from tests.unit.tiny import llama

pytestmark = pytest.mark.distributed

MANY = (
    "evaluate.prompts=[import]",
    "evaluate.patience=3",
    "train.eval_every=5",
    "optimizer.changes=[{step: 10, lr: 1e-3}]",
    "checkpoint=default",
    "checkpoint.every=5",
    "report=default",
    "report.to=[tensorboard]",
    "report.preview=0",
    "train.max_hours=1",
    "islands=diloco",
    "islands.count=2",
    "islands.index=0",
    "islands.address=127.0.0.1:9",
)


class Mine(TrainerCallback):
    """One that a recipe of somebody's own adds between its last two steps."""


class Ready(Exception):
    """The training would begin."""


def names(trainer):
    return [type(callback).__name__.lstrip("_") for callback in trainer.callback_handler.callbacks]


def order_of(config):
    """The names of a run's callbacks where its training would begin."""
    from hfdist.run import own_plan, prepare_run

    def train(self, *args, **kwargs):
        raise Ready(names(self))

    transformers.Trainer.train = train
    # Nobody looks at the plan, which would measure this machine first.
    own_plan._MOST_SECONDS = 0.0
    run = prepare_run(config)
    steps = (run.find_model, run.open_data, run.open_folder, run.start_ranks, run.build_model, run.build_trainer)
    for step in steps:
        step()
    run.trainer.add_callback(Mine())
    with pytest.raises(Ready) as ready:
        run.train()
    return ready.value.args[0]


def order_in(folder, *overrides):
    (found,) = run_ranks(order_of, 1, compose_config([*SMALL, f"run.dir={folder}", *overrides]), group=False)
    return found


def test_with_as_much_as_goes_together(tmp_path, cache_dir):
    assert order_in(tmp_path, *MANY) == [
        # It moves the lines of an earlier start away, before others open their files.
        "Beginning",
        "DefaultFlowCallback",
        # Given to the Trainer.
        "Trackers",
        "MetricsWriter",
        "ProgressBar",
        "PromptSamples",
        "EarlyStopping",
        "Usage",
        # Of the Trainer itself.
        "RankFlags",
        "RoundIsland",
        # Once the Trainer is built.
        "OptimizerChanges",
        "TimelineWriter",
        "RankTimes",
        "Alerts",
        "Traffic",
        "PlanGrader",
        "Mine",
        # Where the training begins.
        "Preemption",
        "Budget",
        "Watch",
        "RecordWriter",
        "FirstStep",
    ]


def test_with_as_little_as_can_be(tmp_path, cache_dir):
    given, built = ["MetricsWriter", "Usage"], ["RankTimes", "Traffic"]
    assert order_in(tmp_path, "report.alerts=false", "report.timeline=false", "data.eval_fraction=0") == [
        *["Beginning", "DefaultFlowCallback", *given, "RankFlags", *built, "Mine"],
        *["Budget", "Watch", "RecordWriter", "FirstStep"],
    ]


def test_with_rewards(tmp_path, cache_dir, policy, sums):
    config = make_config(tmp_path, policy, sums, "task=grpo", *policy_runs.COMMON)
    (found,) = run_ranks(order_of, 1, config, group=False)
    assert found[2 : found.index("RankFlags")] == ["MetricsWriter", "RolloutLines", "Usage"]


def test_of_a_trainer_from_python(tmp_path):
    def build():
        arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True)
        return names(hfdist.Trainer(llama(), arguments, strategy="single", callbacks=[Mine()]))

    (found,) = run_ranks(build, 1, group=False)
    assert found == ["DefaultFlowCallback", "Mine", "PrinterCallback", "RankFlags"]
