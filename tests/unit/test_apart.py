"""What is done apart gives its error here, and none of its time and memory."""

import os
import re
import time

import pytest

from hfdist.apart import Limits, do_apart
from hfdist.errors import ConfigError, HfdistError, ResourceError

FILE = {"where": "model.name", "found": "model/config.json"}


def fails(error):
    def do():
        raise error

    return do


def test_what_is_done_apart_changes_nothing_here(tmp_path):
    seen = []
    do_apart(lambda: (seen.append(1), (tmp_path / "made").write_text("by a fork")), **FILE)
    assert not seen
    assert (tmp_path / "made").read_text() == "by a fork"


@pytest.mark.parametrize(
    ("do", "what"),
    [
        (lambda: re.fullmatch("(([a-z])+)+X", "a" * 60), "more than 1 CPU seconds"),
        (lambda: bytearray(2**33), "more than 0.5 GiB"),
        (lambda: [[] for _ in range(2**34)], "more than"),
        (os.abort, "SIGABRT"),
        (lambda: os.kill(os.getpid(), 40), "by signal 40"),
        (lambda: os._exit(3), "ended a process"),
        (fails(KeyError("rope_type")), "cannot be read: KeyError: 'rope_type'"),
        (fails(RecursionError("too deep")), "cannot be read: RecursionError: too deep"),
        (fails(SystemExit(1)), "cannot be read: SystemExit"),
    ],
)
def test_limits_and_what_libraries_raise_become_one_error_with_the_file(do, what):
    begin = os.times()
    with pytest.raises(ConfigError, match=re.escape(what)) as caught:
        do_apart(do, **FILE, limits=Limits(cpu_seconds=1, memory_bytes=2**29))
    assert (caught.value.where, caught.value.found) == ("model.name", "model/config.json")
    assert os.times().user - begin.user < 0.5


def test_what_waits_is_ended():
    with pytest.raises(ConfigError, match=r"more than 0 s"):
        do_apart(lambda: time.sleep(60), **FILE, limits=Limits(wall_seconds=0.3))


def test_however_long_an_error_it_arrives():
    with pytest.raises(ConfigError) as caught:
        do_apart(fails(ConfigError("\x01" * 9_000, found="\u2028" * 9_000, hint="é" * 9_000)), **FILE)
    assert "\x01" in caught.value.what


@pytest.mark.parametrize("kind", [ValueError, ConfigError])
def test_a_secret_is_masked_before_an_error_is_cut(kind):
    token = "hf_" + "aB3" * 12
    for length in (480, 1_980):
        with pytest.raises(ConfigError) as caught:
            do_apart(fails(kind("x" * length + " " + token)), **FILE)
        assert "hf_" not in caught.value.what


def test_errors_of_ours_are_raised_as_they_are():
    error = ResourceError("the disk", where="here", found=3, allowed="more", hint="another")
    with pytest.raises(ResourceError) as caught:
        do_apart(fails(error), **FILE)
    assert str(caught.value) == str(error)
    with pytest.raises(OSError, match="No space") as system:
        do_apart(fails(OSError(28, "No space left")), **FILE)
    assert system.value.errno == 28
    assert not isinstance(system.value, HfdistError)
