"""The command line in real processes: quick answers without torch, one message a mistake, exit codes, launch files."""

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from hfdist.config.cli.process_end import RANK_0_PRINTS_SECONDS
from tests.marks import many

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "pretrain.py"

# Says at the end whether the process has loaded any of the heavy libraries, and writes down how many calls it has made.
SITECUSTOMIZE = """
import atexit, os, sys
from cProfile import Profile
profiler = Profile()
def report():
    profiler.disable()
    heavy = [name for name in ("torch", "transformers", "datasets", "deepspeed", "accelerate") if name in sys.modules]
    sys.stderr.write(f"HEAVY={heavy}\\n")
    with open(os.path.join(os.path.dirname(__file__), "calls"), "w") as file:
        file.write(str(sum(called.callcount for called in profiler.getstats())))
atexit.register(report)
profiler.enable()
"""
# Not seconds, which a busy machine stretches threefold. About two million are made, most of them by Hydra.
MOST_CALLS = 4_000_000


def environment(**extra):
    """Ours, without a launcher's variables."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONPATH")}
    return kept | extra


def run(*arguments, cwd, script=RECIPE, **extra):
    """Run a recipe to its end."""
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=cwd,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def watched(tmp_path):
    """A PYTHONPATH that makes each process say what it has loaded."""
    folder = tmp_path / "watch"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["strategy: 3d, ddp, fsdp2", "+experiment=demo", "optimizer:", "--config-dir", "conf/"]),
        many(["--cfg", "job", "--resolve", "--package", "run"], ["dir: runs/pretrain"]),
        (
            ["--cfg", "job", "model.config.x=1", "experiment=demo", "data.sources.a.path=/x", "run.name=1e5"],
            ["    x: 1", "max_steps: ", "dir: runs/${run.name}", "path: /x", "name: '1e5'"],
        ),
        many(["--info", "defaults"], ["model/small", "run_schema"]),
    ],
)
def test_questions_are_answered_quickly_without_torch(arguments, words, tmp_path, watched):
    done = run(*arguments, cwd=tmp_path, **watched)
    assert done.returncode == 0, done.stderr
    for word in words:
        assert word in done.stdout
    assert done.stderr == "HEAVY=[]\n"
    assert 10**4 < int((tmp_path / "watch" / "calls").read_text()) < MOST_CALLS
    assert [path.name for path in tmp_path.iterdir()] == ["watch"]


def test_shell_completion_knows_options_and_keys(tmp_path):
    for word, expected in (("strategy=ze", "strategy=zero2"), ("optimizer.warm", "optimizer.warmup_steps=")):
        line = f"python {RECIPE} {word}"
        done = run("-sc", "query=bash", cwd=tmp_path, COMP_LINE=line, COMP_POINT=str(len(line)))
        assert expected in done.stdout.split(), done.stderr


def test_a_typo_is_one_message_and_exit_code_2(tmp_path, watched):
    done = run("optimizer.lrr=1e-3", cwd=tmp_path, **watched)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Config error: there is no key `optimizer.lrr`\n")
    assert "  try:     optimizer.lr=1e-3\nHEAVY=[]\n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        many(["data=no/such.jsonl"], "data.sources.files.path"),
        many(["strategy=zero2"], "strategy.data"),
        (["model=hub", "model.name=./none"], "model.name"),
    ],
)
def test_what_needs_no_torch_is_found_without_it(arguments, where, tmp_path, watched):
    done = run(*arguments, cwd=tmp_path, **watched)
    assert done.returncode == 2
    assert f"  where:   {where}\n" in done.stderr
    assert done.stderr.endswith("HEAVY=[]\n")


def test_questions_about_a_wrong_config_get_our_message(tmp_path):
    done = run("--help", "strategy=zero4", cwd=tmp_path)
    assert done.returncode == 2
    assert "the group `strategy` has no option `zero4`" in done.stderr
    assert "Traceback" not in done.stderr


def run_two_ranks(script, *arguments, cwd):
    """Two processes with a launcher's environment, without a launcher. Gives (exit code, stderr, seconds) of each."""
    start = time.perf_counter()
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            cwd=cwd,
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2"),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = []
    for process in processes:
        _, stderr = process.communicate(timeout=120)
        answers.append((process.returncode, stderr, time.perf_counter() - start))
    return answers


def test_two_ranks_with_the_same_mistake_print_one_message(tmp_path):
    (code_0, text_0, _), (code_1, text_1, seconds_1) = run_two_ranks(RECIPE, "optimizer.lrr=1", cwd=tmp_path)
    assert (code_0, code_1) == (2, 2)
    assert (text_0 + text_1).count("Config error") == 1
    assert text_1 == ""
    assert seconds_1 >= RANK_0_PRINTS_SECONDS


SCRIPT = """
import os, sys
from hfdist.config.cli.command import recipe
from hfdist.errors import DataError

@recipe()
def main(config):
    mode, rank = os.environ["MODE"], int(os.environ.get("RANK", 0))
    if mode == "config":
        print(config.run.name, config.train.max_steps)
    elif mode == "data":
        raise DataError("no rows", where="data.sources")
    elif mode == "one rank":
        if rank == 1:
            raise DataError("no rows here")
    elif mode == "group":
        import torch.distributed as dist
        dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meet", rank=rank, world_size=2)
        if rank == 1:
            raise DataError("no rows here")
        # What a rank does when another has failed: it waits in a collective.
        try:
            dist.barrier()
        except RuntimeError:
            os._exit(0)
    elif mode == "interrupt":
        raise KeyboardInterrupt
    elif mode == "bug":
        raise ValueError("ours")

main()
"""


@pytest.fixture
def script(tmp_path):
    """A recipe of a user, outside the checkout."""
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    ("mode", "code", "stdout", "stderr"),
    [
        ("config", 0, "x 7\n", ""),
        ("data", 3, "", "Data error: no rows\n  where:   data.sources\n"),
        ("interrupt", 130, "", ""),
    ],
)
def test_how_a_recipe_ends(script, mode, code, stdout, stderr):
    done = run("run.name=x", "train.max_steps=7", cwd=script.parent, script=script, MODE=mode)
    assert (done.returncode, done.stdout, done.stderr) == (code, stdout, stderr)


def test_a_bug_keeps_its_traceback(script):
    done = run(cwd=script.parent, script=script, MODE="bug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ValueError: ours" in done.stderr


def test_an_error_of_a_rank_other_than_0_is_not_lost(script, monkeypatch):
    monkeypatch.setenv("MODE", "one rank")
    (code_0, text_0, _), (code_1, text_1, _) = run_two_ranks(script, "strategy=ddp", cwd=script.parent)
    assert (code_0, text_0) == (0, "")
    assert (code_1, text_1) == (3, "[rank 1] Data error: no rows here\n")


def test_with_a_process_group_the_failing_rank_speaks_and_goes_at_once(script, monkeypatch):
    monkeypatch.setenv("MODE", "group")
    _, (code_1, text_1, _) = run_two_ranks(script, "strategy=ddp", cwd=script.parent)
    assert code_1 == 3
    assert "[rank 1] Data error: no rows here\n" in text_1
    assert "Traceback" not in text_1


def test_a_config_dir_is_relative_to_where_the_command_starts(script):
    folder = script.parent / "own" / "train"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("defaults: [default]\nmax_steps: 12\n")
    done = run("--config-dir", "own", "train=mine", cwd=script.parent, script=script, MODE="config")
    assert done.stdout == "pretrain 12\n"


# conf/launch: files for accelerate


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "launch").glob("*.yaml")), ids=lambda p: p.stem)
def test_launch_files_say_processes_and_hosts_only(path):
    values = yaml.safe_load(path.read_text())
    assert path.read_text().startswith("# ")
    assert "accelerate launch --config_file conf/launch/" + path.name in path.read_text().replace("\n#  ", "")
    assert values["num_processes"] == math.prod(map(int, path.stem.rpartition("_")[2].split("x")))
    assert (values["distributed_type"] == "MULTI_GPU") == (values["num_processes"] > 1)
    assert values["use_cpu"] == path.stem.startswith("cpu")
    assert not values.keys() & {"mixed_precision", "deepspeed_config", "fsdp_config", "gradient_accumulation_steps"}
