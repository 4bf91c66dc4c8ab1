"""The command: what it writes and where, its mistakes in one message, and the end of a page that is served."""

import os
import signal
import subprocess
import sys

import pytest

from hfdist.errors import ConfigError
from hfdist.tools.report import command
from tests.unit.config.shipped import CONF
from tests.unit.report.folders import write_run


def call(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["report", *arguments])
    code = 0
    try:
        command.main()
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        write_run(tmp_path / "runs" / name)
    return tmp_path / "runs"


def test_the_page_of_a_run_is_written_into_its_folder_and_that_of_several_here(runs, monkeypatch, capsys):
    before = sorted(runs.rglob("*"))
    assert call(monkeypatch, capsys, "runs/first") == (0, "runs/first/report.html\n", "")
    assert "<title>first - hfdist</title>" in (runs / "first" / "report.html").read_text()
    assert call(monkeypatch, capsys, "runs/first", "runs/second", "out=both.html") == (0, "both.html\n", "")
    assert "<title>first, second - hfdist</title>" in (runs.parent / "both.html").read_text()
    assert sorted(runs.rglob("*")) == sorted([*before, runs / "first" / "report.html"])
    assert sorted(path.name for path in runs.parent.iterdir()) == ["both.html", "runs"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "which runs?"),
        (["runs/frist"], "try:     runs/first"),
        (["runs"], "there is no such run"),
        (["x" * 300], "File name too long"),
        (["x" * 300 + "/y"], "File name too long"),
        (["runs/first", "outt=x"], "try:     out=x"),
        (["runs/first", "--life"], "try:     --live"),
        (["runs/first", "out=runs"], "this is a folder"),
        (["runs/first", "out=report.pdf"], "try:     out=report.html"),
        (["runs/first", "port=http"], "this is no port"),
        (["runs/first", "port=70000"], "this is no port"),
    ],
)
def test_mistakes_are_one_message(runs, monkeypatch, capsys, arguments, said):
    code, out, err = call(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_a_page_that_cannot_be_written(runs, monkeypatch, capsys):
    code, out, err = call(monkeypatch, capsys, "runs/first", "out=gone/report.html")
    assert (code, out) == (7, "")
    assert "the page cannot be written" in err


def test_help(monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "--help")
    assert code == 0
    assert "--live" in out


def test_the_same_run_twice_is_one(runs):
    assert len(command.parse_request(["runs/first", "runs/first"]).folders) == 1
    with pytest.raises(ConfigError, match="which runs"):
        command.parse_request(["out=x.html"])


def test_ctrl_c_ends_a_page_that_is_served_without_torch(runs):
    code = "import sys; from hfdist.tools.report.command import main; main(); print('torch' in sys.modules)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "runs/first", "--live"],
        # Tests that a shell runs behind itself have it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env=os.environ | {"PYTHONPATH": str(CONF.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().startswith("http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.endswith("False\n")
