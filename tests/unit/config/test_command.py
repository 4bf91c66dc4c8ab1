"""The parts of the command line that need no process: flags, and the private seam to Hydra."""

import argparse
import inspect
import subprocess
import sys

import pytest
from hydra._internal.utils import get_args_parser

from hfdist.config.cli.command import _parse_flags, recipe
from hfdist.errors import ConfigError
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
    flags = _parse_flags(["a=1", "--config-dir", "x", "b=2", "--cfg", "job", "+c=3", "~d"])
    assert flags.overrides == ["a=1", "b=2", "+c=3", "~d"]
    assert (flags.config_dir, flags.cfg) == ("x", "job")


@pytest.mark.parametrize(
    ("arguments", "words", "hint"),
    [
        (["--multirun", "a=1,2"], "one command is one run", "for lr in"),
        (["-m"], "one command is one run", "for lr in"),
        (["--config-path", "x"], "not available", "--config-dir"),
        (["--experimental-rerun", "x.pickle"], "not available", "--config-name config"),
        (["--learning_rate=1e-4"], "no such flag", "optimizer.lr=1e-4"),
        (["--learning-rate", "1e-4"], "no such flag", "optimizer.lr=1e-4"),
        (["--num_train_epochs", "3"], "no such flag", "train.epochs="),
        (["--train.max_steps=3"], "no such flag", "train.max_steps=3"),
        (["--config-nam", "x", "--confg-dir", "y"], "no such flag", "--config-dir"),
        (["--cfg", "jobs"], "cannot be read", "--help"),
        (["--help", "--cfg", "job"], "only one of these flags", None),
    ],
)
def test_flags_that_are_refused(arguments, words, hint):
    with pytest.raises(ConfigError) as caught:
        _parse_flags(arguments)
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
    command = [sys.executable, CONF.parent / "recipes" / "pretrain.py", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        # Before the help is there; `| head` closes it while it comes.
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
