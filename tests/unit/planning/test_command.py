"""The command line of `hfdist plan`: mistakes are found before torch is imported."""

import subprocess
import sys

import pytest

from hfdist.config.plan import SECTION
from hfdist.errors import ConfigError
from hfdist.planning.command import parse_request

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
