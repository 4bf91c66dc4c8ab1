"""Who starts the processes of a run: nobody, hfdist itself after all checks, or a launcher."""

import sys

import pytest

from hfdist import launch
from hfdist.config.checks.preflight import plan_run
from hfdist.config.cli import command

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
    with pytest.raises(Exception, match="does not fit") as caught:
        plan_run(
            command.to_run_config(command.compose_untyped(command.make_request("pretrain", ["strategy=ddp"], None)))
        )
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


@pytest.mark.parametrize("several", [{"launch": "launch.processes=2"}, LAUNCHED])
def test_what_takes_one_process_refuses_several(run, several, capsys):
    overrides = [several["launch"]] if "launch" in several else []
    code, done = run("run.name=x", *overrides, takes_ranks=False, **({} if overrides else LAUNCHED))
    assert (code, done) == (2, [])
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
