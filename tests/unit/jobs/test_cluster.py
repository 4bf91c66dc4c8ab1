"""The command line of `hfdist job`, and the keys of a cluster: mistakes are found before anything is written."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hfdist.config.cli.about_run import RECIPES
from hfdist.errors import ConfigError
from hfdist.records import Event, RunFolder, add_event
from hfdist.tools.jobs.command import TARGETS, parse_job, write_job
from tests.unit.config.shipped import CONF
from tests.unit.jobs.jobs import RUN

PRESETS = sorted(path.stem for path in (CONF / "cluster").glob("*.yaml"))


def refused(*arguments):
    with pytest.raises(ConfigError) as caught:
        write_job(*parse_job(["to=slurm", *RUN, *arguments]))
    return caught.value


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_fits_the_command_in_its_comment(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (CONF / "cluster" / f"{name}.yaml").read_text(encoding="utf-8")
    found = re.search(r"hfdist job (to=[^\n]*)", text)
    if found is None:
        assert name == "default"
        return
    words = [word for word in found[1].split() if word != "..."]
    words += [] if any(word.startswith("strategy=") for word in words) else ["strategy=ddp"]
    nodes, processes = (yaml.safe_load(text).get(key, 1) for key in ("nodes", "processes"))
    sizes = ["train.micro_batch_size=1", f"train.global_batch_size={16 * nodes * processes}"]
    write_job(*parse_job([*words, *sizes, "model=tiny"]))
    assert (tmp_path / f"pretrain.{TARGETS[words[0].partition('=')[2]].ending}").is_file()


@pytest.mark.parametrize(
    ("arguments", "where", "hint"),
    [
        (["cluster.ndoes=2"], "cluster.ndoes (command line)", "cluster.nodes=2"),
        (["cluster.slurm.partitions=x"], "cluster.slurm.partitions (command line)", "cluster.slurm.partition=x"),
        (["nodes=2"], "command line", "cluster.nodes=2"),
        (["trian.max_steps=2"], "trian.max_steps (command line)", "train.max_steps=2"),
        (["cluster=slurn"], "cluster", "cluster=slurm"),
        (["recipe=pretrian"], "recipe (command line)", "recipe=pretrain"),
        (["cluster.nodes=0"], "cluster.nodes", None),
        (["cluster.nodes=many"], "cluster.nodes (command line)", None),
        (["cluster.nodes=1,2"], "command line", None),
        (["cluster.grace_seconds=20"], "cluster.grace_seconds", None),
        (["cluster.hours=0.1"], "cluster.grace_seconds", None),
        (["cluster.slurm.partition='a b'"], "cluster.slurm.partition", None),
        (["cluster.interface='eth0; touch x'"], "cluster.interface", None),
        (["cluster.slurm.options=[exclusive]"], "cluster.slurm.options", "--exclusive"),
        (['cluster.setup=["a\nb"]'], "cluster.setup.0", None),
        (["cluster.environment.A-B=1"], "cluster.environment", None),
        (["cluster.environment.A=[1,2]"], "cluster.environment", None),
        (["cluster.environment.A=null"], "cluster.environment.A (command line)", None),
        (["cluster.setup=[[a]]"], "cluster.setup", None),
        (["cluster.environment.HF_TOKEN=abc"], "cluster.environment.HF_TOKEN (command line)", None),
        (["cluster.nodes=3"], "train.global_batch_size", None),
        (["cluster.nodes=1"], "strategy.data", "cluster.nodes=1 cluster.processes=2"),
        (["launch.processes=4", "cluster.nodes=2"], "launch.processes", None),
        (["--offlin"], "command line", "--offline"),
        (["run=runs/none"], "run (command line)", None),
        (["out=none/x.sbatch", "cluster.nodes=2"], "out (command line)", "mkdir -p none, or out=x.sbatch"),
        (["out=.", "cluster.nodes=2"], "out (command line)", "out=job"),
        (["out=/proc/x.sbatch", "cluster.nodes=2"], "out (command line)", "out=-"),
        (["cluster.same_files=false", 'cluster.folder="~/work"'], "cluster.folder", "cluster.same_files=true"),
        (["cluster.same_files=false", 'cluster.python="~/bin/python"'], "cluster.python", "cluster.same_files=true"),
        (["cluster.same_files=false", "run.dir='~/runs'"], "run.dir", "cluster.same_files=true"),
    ],
)
def test_a_mistake_is_named_before_anything_is_written(tmp_path, monkeypatch, arguments, where, hint):
    monkeypatch.chdir(tmp_path)
    error = refused(*arguments)
    assert error.where == where, error
    assert hint is None or error.hint.startswith(hint), error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "shown"),
    [("Job_1", "job-1"), ("2025-run", "run-2025-run"), ("\u6f22", "run"), (f"{'a' * 39}-b", "a" * 39)],
)
def test_a_job_has_a_name_that_all_schedulers_take(tmp_path, monkeypatch, name, shown):
    """A JobSet and a cluster of AWS begin with a letter, and end with no dash."""
    monkeypatch.chdir(tmp_path)
    assert parse_job(["to=slurm", *RUN[:2], "cluster.nodes=2", f"run.name='{name}'"])[1].name == shown


def test_a_cluster_file_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster").mkdir()
    own = tmp_path / "cluster" / "ours.yaml"
    own.write_text("nodes: 4\nsetup: ['module load $X']\nslurm: {partition: gpu}\n")
    by_folder = parse_job(["to=slurm", *RUN, f"--config-dir={tmp_path}", "cluster=ours", "cluster.nodes=2"])[1]
    by_path = parse_job(["to=slurm", *RUN, f"cluster={own}"])[1]
    assert (by_folder.cluster.nodes, by_path.cluster.nodes) == (2, 4)
    assert by_path.cluster.setup == ["module load $X"]
    assert f"--config-dir {tmp_path}" in " ".join(by_folder.arguments)
    own.write_text("nodes: ${oc.env:HOME}\n")
    assert "interpolated" in refused(f"cluster={own}").what
    own.write_text("node: {}\n")
    assert "no key `cluster.node`" in str(refused(f"cluster={own}"))
    own.write_text("node: 4\n")
    assert "line" in refused(f"cluster={own}").where or "ours.yaml" in refused(f"cluster={own}").where


def test_the_home_folder_is_written_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    home = ('cluster.folder="~/work"', 'cluster.python="~/bin/python"', 'run.dir="~/runs"')
    job = parse_job(["to=slurm", *RUN, "cluster.nodes=2", *home])[1]
    paths = (job.cluster.folder, job.cluster.python, job.config.run.dir)
    assert paths == ("/home/me/work", "/home/me/bin/python", "/home/me/runs")


def test_another_file_stays(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = parse_job(["to=slurm", *RUN, "cluster.nodes=2"])
    Path("Job_1.sbatch").write_text("mine")
    with pytest.raises(ConfigError, match="another file"):
        write_job(*given)
    assert Path("Job_1.sbatch").read_text() == "mine"
    Path("Job_1.sbatch").unlink()
    for _ in range(2):
        write_job(*given)
    assert "to submit it: sbatch Job_1.sbatch" in capsys.readouterr().out


def test_a_run_goes_on_with_its_own_config_and_in_time(tmp_path, monkeypatch):
    from hfdist.config.composition.compose import compose_config
    from hfdist.config.composition.config_text import to_yaml

    monkeypatch.chdir(tmp_path)
    run = Path("runs/first")
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(compose_config([*RUN, "run.name=first", "train.max_steps=7"])))
    job = parse_job(["to=slurm", "cluster.nodes=2", "run=runs/first", "train.max_steps=9"])[1]
    assert (job.config.run.dir, job.config.train.max_steps) == ("runs/first", 9)
    assert list(job.arguments) == ["--config-dir", "runs/first", "--config-name", "config", "train.max_steps=9"]
    RunFolder(run).metrics.write_text(json.dumps({"step": 1, "step_seconds": 40.0}) + "\n")
    add_event(run, Event.save, start=1, step=1, seconds=200.0)
    with pytest.raises(ConfigError) as caught:
        parse_job(["to=slurm", "cluster.nodes=2", "run=runs/first"])
    assert caught.value.hint == "cluster.grace_seconds=540"
    parse_job(["to=slurm", "cluster.nodes=2", "run=runs/first", caught.value.hint])


def test_the_command_loads_no_torch(tmp_path):
    code = "import sys; sys.argv = ['hfdist', 'job', 'to=slurm', 'model=tiny', 'out=-']\n"
    code += "from hfdist.__main__ import main; main(); sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
        env={"PYTHONPATH": str(CONF.parent)},
    )  # fmt: skip
    assert done.stdout.startswith("#!/bin/bash\n")
    assert not list(tmp_path.iterdir())


def shown_commands():
    """The commands of pages and docstrings, but of those that leave something to the reader."""
    for path in [
        *sorted((CONF.parent / "docs").rglob("*.md")),
        CONF.parent / "README.md",
        CONF.parent / "recipes/job.py",
    ]:
        for line in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
            found = re.match(r"(?:hfdist job|python recipes/job.py) (.*)", line)
            if found and "..." not in line:
                yield pytest.param(shlex.split(found[1], comments=True), id=f"{path.name}: {found[1]}")


@pytest.mark.parametrize("words", list(shown_commands()))
def test_a_shown_command_writes_its_files(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    write_job(*parse_job(words))
    assert [*tmp_path.iterdir()]


def test_each_recipe_has_its_primary_config():
    assert all((CONF / f"{name}.yaml").is_file() for name in RECIPES)
