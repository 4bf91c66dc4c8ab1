"""The command line of `hfdist plan`: mistakes are found before torch is imported."""

import subprocess
import sys

import pytest
from transformers import AutoConfig

from hfdist.config.cli import audit
from hfdist.config.composition.compose import compose_config
from hfdist.config.hardware import read_hardware
from hfdist.config.plan import SECTION
from hfdist.errors import ConfigError
from hfdist.planning import answer, calibration_steps, make_plan
from hfdist.planning.candidates import describe_candidates
from hfdist.planning.command import parse_request
from hfdist.planning.not_counted import not_counted
from hfdist.planning.searching.evaluate import Machines
from hfdist.planning.searching.search import search_layouts
from tests.unit.planning.models import make_constants

GPU = "plan.hardware=h100_80gb"


def refused(*arguments):
    with pytest.raises(ConfigError) as caught:
        parse_request(arguments)
    return caught.value


@pytest.mark.parametrize(
    ("arguments", "where", "hint"),
    [
        (["plan.processe=2"], "plan.processe (command line)", "plan.processes=2"),
        (["hardware=h100_80gb"], "command line", "plan.hardware=h100_80gb"),
        (['plan.hardware="~nobody_of_this_name/a.yaml"'], "plan.hardware", None),
        (["plan.hardware=h100_80g"], "plan.hardware", "plan.hardware=h100_80gb"),
        (["trian.max_steps=2"], "trian.max_steps (command line)", "train.max_steps=2"),
        (["plan.processes=0"], "plan.processes", None),
        (["plan.find=memory"], "plan.find (command line)", None),
        (["plan.find=processes", "plan.processes=8"], "plan.processes", "leave plan.processes out"),
        ([GPU, "plan.calibrate=true"], "plan.calibrate", None),
        (["strategy=zero2"], "strategy.data", "plan.processes=2"),
        (["strategy=fsdp2", "strategy.tensor=8", GPU, "plan.processes=12"], "strategy.data", "plan.processes=16"),
        (["train.global_batch_size=30", "plan.processes=4", "strategy=ddp"], "train.global_batch_size", None),
        (["recipe=finetune", "model.name=./none"], "model.name", None),
        (["--jsn"], "command line", "--json"),
        (["run=runs/none"], "run (command line)", None),
        (["recipe=pretrian"], "recipe (command line)", "recipe=pretrain"),
    ],
)
def test_a_mistake_is_named(arguments, where, hint):
    error = refused(*arguments)
    assert error.where == where, error
    assert hint is None or error.hint.startswith(hint), error


def test_processes_are_those_of_the_plan_or_of_the_launch_or_a_machine_full():
    def processes(*arguments):
        return parse_request(["strategy=ddp", "train.micro_batch_size=1", *arguments]).processes

    assert processes(GPU, "plan.processes=16", "launch.processes=2") == 16
    assert processes("launch.processes=2") == 2
    assert processes(GPU, "launch.processes=auto") == 8
    assert parse_request(["plan.find=processes"]).processes is None


def test_a_search_needs_no_layout_that_fits():
    assert parse_request(["strategy=zero2", "plan.search=true", "plan.processes=1"]).plan.search


def test_a_command_that_is_shown_can_be_copied(monkeypatch):
    request = parse_request(["--json", "--offline", GPU, "plan.processes=2", "strategy=ddp", "data=a b.txt"])
    # Without the flag of the plan's own.
    assert request.line.recipe_arguments == ["--offline", "strategy=ddp", "data=a b.txt"]
    machines = Machines(hardware=read_hardware("h100_80gb"), usable_bytes=2.0**35)
    found = search_layouts(request.config, make_constants(), machines, processes=2, best=1).candidates
    assert "`hfdist pretrain --offline strategy=ddp 'data=a b.txt'`" in describe_candidates(request, machines, found)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert refused("data=a b.txt").hint == "hfdist plan 'data=a b.txt', without a launcher"
    with pytest.raises(ConfigError, match="'run=a b', without a launcher"):
        audit.parse_request(["run=a b"])


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ((), "llama", []),
        (("data.images.used=false",), "llava", []),
        ((), "llava", ["no images"]),
        (
            ("recipe=tune", "task=grpo", "task.rewards={arithmetic: 1.0}", "data.format=prompt_completion"),
            "llava",
            ["no images", "prompts only"],
        ),
        (("recipe=tune", "task=distill", "task.teacher=conf"), "llama", []),
        (
            ("recipe=tune", "task=distill", "task.teacher=conf", "task.on_policy=0.5",
             "data.format=prompt_completion"),
            "llama",
            ["steps that learn from the rows"],
        ),
    ],
)  # fmt: skip
def test_a_plan_says_what_it_leaves_out(given, kind, words):
    config = parse_request(["model=tiny", "plan.processes=1", "data=README.md", *given]).config
    note = not_counted(config, AutoConfig.for_model(kind))
    assert [part.partition(": ")[0] for part in note.split("It counts ")[1:]] == words


def test_every_answer_says_what_it_leaves_out(monkeypatch):
    monkeypatch.setattr(answer, "not_counted", lambda *_: "no images")
    monkeypatch.setattr(make_plan, "not_counted", lambda *_: "no images")
    common = ["model=tiny", GPU, "plan.processes=2"]
    for asked in (["strategy=ddp"], ["plan.search=true", "plan.best=1"]):
        found = answer.answer(parse_request([*common, *asked]))
        [content] = found.content if isinstance(found.content, list) else [found.content]
        assert content["not_counted"] == "no images"
        assert found.text.endswith("\n\nno images")


def test_steps_that_calibrate_run_whatever_the_run_is():
    """Also where they leave out what its other keys need. And they join no training that there is."""
    keys = [
        "train.max_hours=2",
        "train.max_cost=2",
        "cost.price_per_hour=1",
        "train.max_kwh=2",
        "train.deadline='9999-01-01'",
    ]
    keys += ["checkpoint.every=10", "train.eval_every=10", "checkpoint.keep_best=true", "checkpoint.replicate_every=5"]
    keys += ["evaluate.patience=3", "evaluate.min_delta=0.1", "evaluate.export=best", "evaluate.lm_eval=[arc_easy]"]
    keys += ["evaluate.lm_eval_include=tests", "optimizer.schedule=wsd", "optimizer.decay_fraction=0.99"]
    keys += ["islands.method=diloco", "islands.count=2", "islands.index=1", "islands.address=host:1"]
    keys += ["report.alert_command=true"]
    config = compose_config(["model=tiny", *keys])
    assert (config.evaluate.patience, config.train.max_kwh, config.islands.is_used) == (3, 2, True)
    steps = compose_config(["model=tiny", *keys, *calibration_steps._STEPS])
    assert (steps.train.max_steps, steps.islands.is_used, steps.report.alert_command) == (7, False, None)


def test_a_mistake_and_the_help_load_no_torch():
    """And no key of the plan is missing in the help."""
    code = (
        "import sys\nfrom hfdist.planning.command import main\n"
        "try:\n    main()\nfinally:\n    assert not {'torch', 'transformers'} & {*sys.modules}\n"
    )
    for arguments, exit_code in ((["--help"], 0), (["plan.hardware=none"], 2)):
        ended = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=60
        )
        assert ended.returncode == exit_code, ended.stderr
        assert "Traceback" not in ended.stderr
        if exit_code == 0:
            assert all(f"\n{name}=" in ended.stdout for name in SECTION.keys)
