"""The command line of a recipe: flags, who starts the processes of a run, and how a program ends."""

import argparse
import inspect
import subprocess
import sys

import pytest
from hydra._internal.utils import get_args_parser

from hfdist.config.checks.preflight import plan_run
from hfdist.config.cli import command
from hfdist.config.cli.command import recipe
from hfdist.config.cli.flags import parse_flags
from hfdist.config.composition.compose import compose_config
from hfdist.errors import ConfigError
from hfdist.launch import launch
from hfdist.strategies import from_python
from tests.unit.config.shipped import CONF


def test_hydras_parser_is_as_we_use_it():
    assert not inspect.signature(get_args_parser).parameters
    parser = get_args_parser()
    assert isinstance(parser, argparse.ArgumentParser)
    flags = vars(parser.parse_args(["a=1", "b=2"]))
    assert flags.pop("overrides") == ["a=1", "b=2"]
    ours = "help hydra_help cfg resolve package run multirun shell_completion config_path config_name config_dir"
    assert set(flags) == {*ours.split(), "experimental_rerun", "info"}
    assert not any(flags.values())


def test_flags_and_overrides_in_any_order():
    flags = parse_flags(["a=1", "--config-dir", "x", "b=2", "--cfg", "job", "+c=3", "~d"])
    assert flags.overrides == ["a=1", "b=2", "+c=3", "~d"]
    assert (flags.config_dir, flags.cfg) == ("x", "job")


@pytest.mark.parametrize(
    ("arguments", "words", "hint"),
    [
        (["--multirun", "a=1,2"], "one command is one run", "hfdist sweep sweep=grid"),
        (["-m"], "one command is one run", "hfdist sweep sweep=grid"),
        (["--config-path", "x"], "not available", "--config-dir"),
        (["--experimental-rerun", "x.pickle"], "not available", "hfdist run <run.dir>"),
        (["--learning_rate=1e-4"], "no such flag", "optimizer.lr=1e-4"),
        (["--learning-rate", "1e-4"], "no such flag", "optimizer.lr=1e-4"),
        (["--num_train_epochs", "3"], "no such flag", "train.epochs="),
        (["--train.max_steps=3"], "no such flag", "train.max_steps=3"),
        (["--config-nam", "x", "--confg-dir", "y"], "no such flag", "--config-dir"),
        (["--cfg", "jobs"], "cannot be read", "--help"),
        # Python 3.13 reads it as -h and -q.
        (["-hq"], "", "--help"),
        (["--help", "--cfg", "job"], "only one of these flags", None),
    ],
)
def test_flags_that_are_refused(arguments, words, hint):
    with pytest.raises(ConfigError) as caught:
        parse_flags(arguments)
    assert words in caught.value.what
    if hint is not None:
        assert hint in caught.value.hint


def test_the_decorated_function_keeps_its_name_and_the_plain_one():
    @recipe()
    def main(config):
        """Do it."""
        return config

    assert (main.__name__, main.__doc__) == ("main", "Do it.")
    assert main.__wrapped__("a composed config") == "a composed config"


def test_help_that_nobody_reads_to_its_end_is_no_error():
    program = [sys.executable, CONF.parent / "recipes" / "pretrain.py", "--help"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        # Before the help is there; `| head` closes it while it comes.
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


# Who starts the processes of a run: nobody, hfdist itself after all checks, or a launcher

LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}


@pytest.fixture
def run(monkeypatch):
    """Run a recipe with overrides; gives its exit code, and what was done: the processes started, or its config."""

    def run(*overrides, takes_ranks=True, **environment):
        done = []

        def start(recipe, config, processes):
            done.append(processes)
            return 75

        for name in LAUNCHED:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(command, "_start_ranks", start)
        monkeypatch.setattr(sys, "argv", ["recipe", "model=tiny", *overrides])
        try:
            command.recipe(takes_ranks=takes_ranks)(lambda config: done.append(config.run.name))()
        except SystemExit as ended:
            return ended.code, done
        return 0, done

    return run


def test_one_process_is_this_one(run):
    assert run("run.name=here") == (0, ["here"])


def test_several_are_started_and_their_exit_code_is_ours(run):
    assert run("launch.processes=2", "strategy=zero2") == (75, [2])


@pytest.mark.parametrize("mistake", ["strategy=single", "train.global_batch_size=15", "launch.processes=none"])
def test_a_mistake_is_found_before_any_is_started(run, mistake, capsys):
    code, done = run("strategy=ddp", "launch.processes=2", mistake)
    assert (code, done) == (2, [])
    assert capsys.readouterr().err.count("Config error") == 1


def test_the_hint_of_too_few_processes_is_right(run, capsys):
    with pytest.raises(ConfigError, match="does not fit") as caught:
        plan_run(compose_config(["strategy=ddp"]))
    hint = str(caught.value.hint).split()[0]
    assert hint == "launch.processes=2"
    assert run("strategy=ddp", hint) == (75, [2])


@pytest.mark.parametrize(("asked", "code"), [("1", 0), ("2", 0), ("auto", 0), ("3", 2)])
def test_under_a_launcher_nothing_is_started(run, asked, code, capsys):
    assert run(f"launch.processes={asked}", "strategy=ddp", "run.name=x", **LAUNCHED) == (
        code,
        ["x"] if code == 0 else [],
    )
    assert ("another number of processes" in capsys.readouterr().err) == (code == 2)


@pytest.mark.parametrize(("overrides", "variables"), [(["launch.processes=2"], {}), ([], LAUNCHED)])
def test_what_takes_one_process_refuses_several(run, overrides, variables, capsys):
    assert run("run.name=x", *overrides, takes_ranks=False, **variables) == (2, [])
    assert "data.workers=2" in capsys.readouterr().err


def test_what_takes_one_process_is_one_on_a_machine_of_several_gpus(run, monkeypatch):
    monkeypatch.setattr(launch, "count_gpus", lambda: 2)
    assert run("launch.processes=auto", "strategy=ddp") == (75, [2])
    assert run("launch.processes=auto", "run.name=x", takes_ranks=False) == (0, ["x"])


def test_a_script_that_a_rank_imports_does_not_begin_again():
    def main(config):
        raise AssertionError

    main.__module__ = "__mp_main__"
    command.recipe()(main)()


# What a program of the user's own ends with: one message, no traceback of ours

PROGRAM = """
import sys
from hfdist.config.cli.process_end import report_uncaught
from hfdist.errors import ConfigError

before = sys.excepthook
report_uncaught()
ours = sys.excepthook
report_uncaught()
assert ours is sys.excepthook and ours is not before
raise {error}
"""


def end_of(program, *flags):
    command = [sys.executable, *flags, "-c", program]
    return subprocess.run(command, input="", capture_output=True, text=True, timeout=60, check=False)


def test_an_error_of_ours_is_a_message_and_an_exit_code():
    ended = end_of(PROGRAM.format(error="ConfigError('this is wrong', where='a.key')"))
    assert (ended.returncode, ended.stderr) == (2, "Config error: this is wrong\n  where:   a.key\n")


def test_other_errors_keep_their_tracebacks():
    ended = end_of(PROGRAM.format(error="KeyError('x')"))
    assert ended.returncode == 1
    assert ended.stderr.startswith("Traceback")


def test_a_session_at_a_prompt_goes_on():
    program = "from hfdist.config.cli.process_end import report_uncaught as r; import sys; b = sys.excepthook; r()"
    ended = end_of(f"{program}; print(b is sys.excepthook)", "-i")
    assert ended.stdout.strip() == "True"


def test_a_strategy_from_python_sets_it_up_before_its_own_mistakes(monkeypatch):
    called = []
    monkeypatch.setattr(from_python, "report_uncaught", lambda: called.append(True))
    with pytest.raises(from_python.ConfigError):
        from_python.make_strategy(global_batch_size=8, shardin="zero2")
    assert called == [True]


def test_a_strategy_from_python_changes_no_layers_to_float8():
    with pytest.raises(from_python.ConfigError, match="only a run changes its layers") as caught:
        from_python.make_strategy(global_batch_size=8, precision="fp8")
    assert caught.value.hint == 'precision="bf16"'
