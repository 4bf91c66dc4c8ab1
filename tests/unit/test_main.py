"""The command `hfdist`: the recipes by name, and what a shell is told when it completes."""

import contextlib
import os
import subprocess
import sys

import pytest

from hfdist import __main__ as command
from hfdist.config.cli.arguments import as_command
from hfdist.config.cli.process_end import print_at_once, tolerating_broken_pipe
from hfdist.errors import UNREAD, DataError
from tests.unit.config.shipped import CONF

RECIPES = {path.stem.replace("_", "-") for path in (CONF.parent / "recipes").glob("[!_]*.py")}


def call(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["hfdist", *arguments])
    try:
        command.main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    return code, said.out, said.err


def test_all_recipes_are_commands(monkeypatch, capsys):
    assert set(command.find_recipes()) == RECIPES
    assert {"pretrain", "finetune", "prove", "doctor", "explain-hang", "job", "report"} <= RECIPES
    code, out, _ = call(monkeypatch, capsys)
    assert code == 0
    assert {line.split()[0] for line in out.splitlines() if line.startswith("  ")} == RECIPES


def test_a_misspelt_command_is_one_message(monkeypatch, capsys):
    code, out, err = call(monkeypatch, capsys, "pretrian", "model=tiny")
    assert (code, out) == (2, "")
    assert "try:     hfdist pretrain" in err


def test_a_recipe_gets_its_flags_and_overrides(monkeypatch, capsys):
    code, out, _ = call(
        monkeypatch, capsys, "finetune", "--cfg", "job", "--package", "run", "run.name=mine", "model.name=x"
    )
    assert code == 0
    assert "name: mine" in out


def test_another_package_of_that_name_is_not_taken(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").write_text("raise ImportError")
    done = subprocess.run(
        [sys.executable, "-m", "hfdist", "pretrain", "--cfg", "job", "--package", "run"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(CONF.parent)])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


BASH = """
COMP_LINE="$1"; COMP_POINT=${#1}; COMP_WORDS=($1); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
hfdist() { "$PYTHON" -m hfdist "$@"; }
eval "$(hfdist completion bash)"
_hfdist; echo "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        ("hfdist audit st", {"step="}),
        ("hfdist exp", {"explain-hang"}),
        ("hfdist job cl", {"cluster=", "cluster."}),
        ("hfdist pretrain model=tiny strategy=ze", {"strategy=zero1", "strategy=zero2", "strategy=zero3",
                                                    "strategy=zero3_offload"}),
    ],
)  # fmt: skip
def test_bash_completes(line, choices):
    done = subprocess.run(
        ["bash", "-c", BASH, "bash", line],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert set(done.stdout.split()) == choices, done.stderr


@contextlib.contextmanager
def unread(monkeypatch):
    """Standard output that nobody reads any more, as after `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        yield out


@pytest.mark.parametrize("num_bytes", [10, 100_000])
def test_who_reads_may_have_seen_enough(num_bytes, monkeypatch):
    """What is not read any more is no error, but another broken connection is."""
    with unread(monkeypatch) as out:
        with tolerating_broken_pipe():
            out.write("x" * num_bytes)
        with pytest.raises(BrokenPipeError), tolerating_broken_pipe():
            raise BrokenPipeError


@pytest.mark.parametrize(("flag", "num_bytes", "code"), [("", 10, 3), ("", 100_000, UNREAD), ("--help", 100_000, 0)])
def test_a_command_that_is_cut_off_does_not_end_as_if_it_were_done(flag, num_bytes, code, monkeypatch, capsys):
    def main(arguments):
        sys.stdout.write("x" * num_bytes)
        raise DataError("a proof failed")

    monkeypatch.setattr(sys, "argv", ["hfdist", flag])
    with unread(monkeypatch), pytest.raises(SystemExit) as ended:
        as_command("x" * num_bytes, main)()
        sys.exit(0)
    assert ended.value.code == code
    assert ("a proof failed" in capsys.readouterr().err) == (code == 3)


def test_work_goes_on_where_nobody_reads(monkeypatch):
    with unread(monkeypatch):
        for line in ("first", "second"):
            print_at_once(line)


def test_standard_output_may_be_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "argv", ["hfdist", "--help"])
    as_command("help", lambda arguments: None)()
