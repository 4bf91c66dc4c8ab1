"""The command line of `hfdist generate`."""

import sys

import pytest

from hfdist.messages.door import SECRET
from hfdist.tune.generators.command import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "which run?"),
        (["join=somewhere"], "HOST:PORT"),
        (["join=host:99999"], "HOST:PORT"),
        (["join=a..b:29700"], "HOST:PORT"),
        (["join=host:29700", "model=/nowhere"], "there is no such folder"),
        (["join=host:29700", "device=1"], "there is no key `device`"),
        (["join=host:29700", "wait_seconds=0"], "a whole number >= 1"),
    ],
)
def test_a_mistake_is_one_message(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(sys, "argv", ["hfdist generate", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_takes_no_files_is_one_message(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hfdist generate", "join=127.0.0.1:1", "folder=/proc/self"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 7
    assert "the run's files cannot be kept or read here\n  where:   /proc/self" in capsys.readouterr().err


def test_a_run_that_does_not_answer_ends_the_wait(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv(SECRET, raising=False)
    # Nobody listens at the first port.
    monkeypatch.setattr(sys, "argv", ["hfdist generate", "127.0.0.1:1", "wait_seconds=1", f"folder={tmp_path}"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 6
    said = capsys.readouterr()
    assert "the run does not answer yet" in said.out
    assert "the run does not answer\n  where:   join\n  found:   127.0.0.1:1: " in said.err
