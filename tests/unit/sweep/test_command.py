"""The command line of a sweep: mistakes are told before anything starts, and presets fit the runs that are shipped."""

import errno
import json
import os
from dataclasses import replace

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.config.sweep import SECTION, LauncherName, Sampler
from hfdist.errors import ConfigError, HfdistError, ResourceError
from hfdist.records import RunFolder
from hfdist.records.trials import SETTINGS, Trial
from hfdist.tools.jobs.cluster import compose_cluster
from hfdist.tools.jobs.job import Job
from hfdist.tools.jobs.ray import write_ray
from hfdist.tools.jobs.slurm import write_slurm
from hfdist.tools.sweep import command
from hfdist.tools.sweep.command import STUDY, _make_launcher, check_some_have_ended, parse_sweep
from hfdist.tools.sweep.folder import keep_settings
from hfdist.tools.sweep.launchers.slurm import SlurmLauncher
from tests.unit.jobs.jobs import run_script, shell_of

RUN = ("model=tiny", "train.global_batch_size=8")
CONSTANT = ("optimizer.schedule=constant", "optimizer.warmup_fraction=null", "optimizer.warmup_steps=2")
LR = "optimizer.lr=tag(log, interval(1e-4, 1e-2))"


@pytest.mark.parametrize("name", sorted(SECTION.options()))
def test_presets_fit_runs(tmp_path, name):
    own = () if name in ("lr_range", "batch_size") else ("optimizer.lr=1e-3,1e-2",) if name == "grid" else (LR,)
    _, sweep, _ = parse_sweep([f"sweep={name}", f"run.dir={tmp_path}", *RUN, *CONSTANT, *own])
    assert sweep.folder == tmp_path
    assert sweep.config.trials > 1
    if sweep.config.sampler is Sampler.grid:
        assert len(sweep.space.grid()) > 1
    assert sweep.base[0] == "pretrain"
    assert not any("optimizer.lr" in word for word in sweep.base)


def test_a_space_of_listed_values_is_a_grid_wherever_it_stands(tmp_path):
    arguments = [f"run.dir={tmp_path}", *RUN, "sweep.space={optimizer.lr: '1e-3,3e-3'}"]
    assert parse_sweep(arguments)[1].config.sampler is Sampler.grid


def test_the_command_line_wins_over_the_space_of_a_preset(tmp_path):
    arguments = ["sweep=lr_range", f"run.dir={tmp_path}", *RUN, "optimizer.lr=0.5,0.25"]
    assert [values["optimizer.lr"] for values in parse_sweep(arguments)[1].space.grid()] == [0.5, 0.25]
    with pytest.raises(ConfigError, match="nothing varies"):
        parse_sweep([*arguments[:-1], "optimizer.lr=0.5"])


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        (["optimizer.lr=1e-3"], "nothing varies", "'optimizer.lr=choice(1e-4, 1e-3)'"),
        (["sweep=tpee", LR], "there is no such sweep", "sweep=tpe"),
        (["sweep.trails=3", LR], "there is no key `sweep.trails`", "sweep.trials=3"),
        (["trials=3", LR], "keys of the sweep begin with its name", "sweep.trials=3"),
        (["optimizer.lrr=1,2"], "there is no key `optimizer.lrr`", "optimizer.lr=1,2"),
        (["optimizer.name=adamw,adamm"], "the value has the wrong type", "optimizer.name=adamw"),
        (["train.micro_batch_size=3,8"], "the global batch does not divide", None),
        (["optimizer.lr=interval(-1,1)"], "the number is out of range", None),
        (["sweep=grid", LR], "a grid takes choices", None),
        (["sweep=asha", LR], "another learning rate before", None),
        (["sweep=asha", LR, *CONSTANT, "checkpoint=none"], "there is none", None),
        (["sweep=asha", LR, *CONSTANT, "train.max_steps=18"], "the warm-up is as long as the whole run", None),
        (
            ["sweep=asha", LR, *CONSTANT, "optimizer.schedule=wsd", "optimizer.decay_fraction=0.7"],
            "would fall before",
            None,
        ),
        (["sweep=pbt", "data.seed=1,2", *CONSTANT], "a member's value changes", None),
        (["sweep=pbt", "optimizer.min_lr_ratio=interval(0.1,0.2)", *CONSTANT], "a smallest rate has no meaning", None),
        (["sweep=pbt", LR, "optimizer.changes=[{step: 3, lr: 1}]", *CONSTANT], "changes the optimizer's values", None),
        (["sweep.launcher=slurmm", LR], "this value does not fit", None),
        (["cluster.nodes=2", LR], "trials run on this machine", "sweep.launcher=slurm"),
        (["sweep.launcher=ray", LR], "a package that is not installed", None),
        (
            ["sweep=pbt", "sweep.rungs=3", LR, *CONSTANT],
            "a population has generations in place of rungs",
            "sweep.rungs=1",
        ),
        (["sweep.generations=3", LR], "only population based training", "sweep=pbt"),
        (["sweep.slots=2", "sweep.devices=['0']", LR], "each slot needs its devices", "sweep.slots=1"),
    ],
)
def test_mistakes_are_told_before_anything_starts(tmp_path, arguments, what, hint):
    with pytest.raises(ConfigError, match=what) as caught:
        parse_sweep([f"run.dir={tmp_path}/run", *RUN, *arguments])
    assert hint is None or caught.value.hint == hint
    assert not (tmp_path / "run").exists()


def test_a_warmup_by_a_share_of_the_steps_is_told_by_its_value(tmp_path):
    share = ["optimizer.warmup_steps=0", "optimizer.warmup_fraction=0.25"]
    with pytest.raises(ConfigError) as caught:
        parse_sweep([f"run.dir={tmp_path}/run", *RUN, "sweep=asha", LR, *CONSTANT, *share])
    assert caught.value.found == "constant, 0.25"


def test_listed_values_are_each_tried_once(tmp_path):
    def sampler(*arguments):
        return parse_sweep([f"run.dir={tmp_path}/run", *RUN, *arguments])[1].config.sampler

    assert sampler("optimizer.lr=1e-3,1e-4") is Sampler.grid
    assert sampler("optimizer.lr=1e-3,1e-4", "sweep.sampler=random") is Sampler.random
    assert sampler("optimizer.lr=1e-3,1e-4", "sweep=tpe") is Sampler.tpe
    assert sampler("optimizer.beta1=0.8,0.9", LR) is Sampler.tpe


def test_the_folder_of_a_run_is_no_sweeps(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    with pytest.raises(ConfigError, match="holds a run already") as caught:
        parse_sweep([f"run.dir={tmp_path}/run", *RUN, LR])
    assert caught.value.hint == "run.name=run-sweep"


def test_a_folder_keeps_what_was_asked(tmp_path):
    def keep(*arguments):
        keep_settings(parse_sweep([f"run.dir={tmp_path}", *RUN, *arguments])[1])

    keep(LR)
    keep(LR, "sweep.trials=50", "sweep.slots=2")
    assert json.loads((tmp_path / SETTINGS).read_text())["sampler"] == "tpe"
    assert not (tmp_path / STUDY).exists()
    for changed in ((LR, "sweep.seed=1"), (LR, "train.max_steps=5"), ("optimizer.lr=interval(1e-4,1)",)):
        with pytest.raises(ConfigError, match="has begun otherwise"):
            keep(*changed)


def test_a_key_that_an_older_folder_does_not_have_counts_as_its_default(tmp_path):
    _, sweep, _ = parse_sweep([f"run.dir={tmp_path}", *RUN, LR])
    keep_settings(sweep)
    kept = json.loads((tmp_path / SETTINGS).read_text())
    del kept["launcher"]
    (tmp_path / SETTINGS).write_text(json.dumps(kept))
    keep_settings(sweep)
    with pytest.raises(ConfigError, match="has begun otherwise") as caught:
        keep_settings(replace(sweep, config=replace(sweep.config, launcher=LauncherName.slurm)))
    assert caught.value.where == "sweep.launcher"


@pytest.mark.parametrize(("name", "write"), [("slurm", write_slurm), ("ray", write_ray)])
def test_the_job_of_a_trial_starts_its_run(tmp_path, monkeypatch, name, write):
    """In a shell, as on each machine; what SLURM and Ray do with it, `make cluster` and `make jobs` see."""
    monkeypatch.chdir(tmp_path)
    arguments = [f"run.dir={tmp_path}/sweep", *RUN, LR]
    _, sweep, _ = parse_sweep(arguments)
    sweep = replace(sweep, config=replace(sweep.config, launcher=LauncherName[name]))
    launcher = _make_launcher(sweep, compose_cluster("default", ["cluster.nodes=2"], None), arguments)
    own = sweep.overrides_of(Trial(number=3, values={"optimizer.lr": 0.005}), 0)
    job = launcher._make_job(own, tmp_path / "job")
    texts = {file.path.name: file.text for file in write(job).files}
    _, calls = run_script(shell_of(name, texts), tmp_path)
    assert calls
    for words, _ in calls:
        assert words[words.index("-m") :] == ["-m", "hfdist", *sweep.base, *own]
    assert {"optimizer.lr=0.005", f"run.dir={tmp_path}/sweep/trial-0003"} <= set(own)


def test_a_sweep_of_which_all_trials_have_failed_is_an_error(tmp_path):
    trials = [Trial(number=number, values={}, failure="the loss is not finite") for number in range(6)]
    with pytest.raises(HfdistError, match="all trials have failed") as caught:
        check_some_have_ended(tmp_path, trials)
    assert caught.value.exit_code == 1
    assert caught.value.found[0] == "trial 0: the loss is not finite"
    assert caught.value.found[-1] == "and 2 more"
    trials[3].failure = None
    check_some_have_ended(tmp_path, trials)
    check_some_have_ended(tmp_path, [])


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("optimizer.lr=loguniform(1e-5,1e-3)", "optimizer.lr=tag(log, interval(1e-5, 1e-3))"),
        ("train.micro_batch_size=randint(1,8)", "train.micro_batch_size=int(interval(1, 8))"),
    ],
)
def test_distributions_of_other_tools_are_answered_with_ours(tmp_path, given, hint):
    with pytest.raises(ConfigError) as caught:
        parse_sweep([f"run.dir={tmp_path}/run", *RUN, given])
    assert caught.value.hint == f"'{hint}'"
    parse_sweep([f"run.dir={tmp_path}/run", *RUN, "sweep=random", hint])


def test_a_sweep_that_fails_leaves_its_folder_to_others(tmp_path, monkeypatch):
    def fail(*_):
        assert RunFolder(tmp_path).lock.read_text()
        raise HfdistError("a failure")

    monkeypatch.setattr(command, "_run", fail)
    with pytest.raises(HfdistError, match="a failure"):
        command._sweep([f"run.dir={tmp_path}", *RUN, LR])
    assert RunFolder(tmp_path).lock.read_text() == ""


def test_a_full_disk_is_one_message(tmp_path, monkeypatch):
    def fill(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # Where the sweep writes its first file, and with it every later one.
    monkeypatch.setattr("hfdist.atomic_write.os.fsync", fill)
    with pytest.raises(ResourceError, match="a file of the sweep cannot be written") as caught:
        command._sweep([f"run.dir={tmp_path}", *RUN, LR])
    assert (caught.value.where, caught.value.found) == (str(tmp_path), "No space left on device")


@pytest.mark.parametrize(
    ("said", "jobs"), [("123;cluster", [123]), ("--> Verifying: 2 nodes\n\n77\n", [77]), ("-->\n", [])]
)
def test_the_number_of_a_job_is_found_in_what_a_site_adds(tmp_path, monkeypatch, said, jobs):
    (tmp_path / "said").write_text(said)
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ncat {tmp_path}/said\n")
    (tmp_path / "squeue").write_text("#!/bin/sh\nexit 1\n")
    for name in ("sbatch", "squeue"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    config = compose_config(["run.name=x", *RUN])
    cluster = compose_cluster("slurm", [])

    def make_job(overrides, path):
        return Job(recipe="pretrain", arguments=overrides, config=config, cluster=cluster, command=["x"], path=path)

    launcher = SlurmLauncher(make_job)
    if not jobs:
        with pytest.raises(ConfigError, match="SLURM does not take the job"):
            launcher.start([], tmp_path, slot=0, rung=0)
    else:
        launcher.start([], tmp_path, slot=0, rung=0)
        assert [*launcher.read_queue()] == jobs
