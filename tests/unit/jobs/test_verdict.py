"""What a job's script is told of a run that has ended."""

import json
import resource
import subprocess
import sys

import pytest

from hfdist.launch.address import address_of, find_route, listen
from hfdist.messages.door import knock
from hfdist.records import RunFolder, RunRecord, read_run
from hfdist.tools.jobs.verdict import judge
from tests.unit.jobs.jobs import leave


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 7, 8, 130, 137])
def test_such_an_end_stays(tmp_path, code):
    leave(tmp_path, (code, 10))
    assert judge(tmp_path, 0, 1, 3) == (code, False)


def test_a_run_that_was_told_to_stop_starts_again_however_often(tmp_path):
    leave(tmp_path, *[(75, 0)] * 9)
    assert judge(tmp_path, 8, 143, 0) == (75, True)


def test_a_start_that_was_refused_says_what_its_launcher_said(tmp_path):
    assert judge(tmp_path, 0, 1, 3) == (1, False)
    leave(tmp_path, (75, 10))
    # The record is that of the start before.
    assert judge(tmp_path, 1, 2, 3) == (2, False)
    assert judge(tmp_path, 1, 0, 3) == (1, False)


@pytest.mark.parametrize(
    ("ends", "losses"),
    [
        ([(6, 10)], 1),
        ([(6, 10), (6, 10), (None, 9)], 3),
        ([(6, 10), (6, 20), (6, 30)], 1),  # each got further
        ([(6, 30), (75, 40), (6, 35)], 1),  # told to stop meanwhile
        ([(6, 30), (6, 10), (6, 20)], 3),
    ],
)
def test_losses_count_that_got_no_further(tmp_path, ends, losses):
    leave(tmp_path, *ends)
    assert judge(tmp_path, len(ends) - 1, 1, losses) == (6, True)
    assert judge(tmp_path, len(ends) - 1, 1, losses - 1) == (6, False)


def test_an_end_that_was_corrected_counts_once(tmp_path):
    leave(tmp_path, *[(6, 10)] * 3)
    path = RunFolder(tmp_path).events
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    # Rank 0 met what followed from the end of another rank, and its launcher knew better.
    lines = [own for line in lines for own in (line | {"exit_code": 1}, line)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert judge(tmp_path, 2, 1, 3) == (6, True)
    assert judge(tmp_path, 2, 1, 2) == (6, False)


def test_a_record_that_still_runs_is_of_a_lost_start(tmp_path):
    RunFolder(tmp_path).record.write_text(json.dumps(RunRecord(start=1, step=4).to_json()))
    assert judge(tmp_path, 0, 1, 1, wait_seconds=0.0) == (6, True)
    assert judge(tmp_path, 0, 1, 0, wait_seconds=0.0) == (6, False)


def cpu_seconds():
    """Of all processes that this one has started, and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_program_answers_in_a_moment_and_loads_no_torch(tmp_path):
    leave(tmp_path, (75, 10))
    code = "import runpy, sys; runpy.run_module('hfdist.tools.jobs.verdict', run_name='__main__')"
    code += "; sys.exit(bool({'torch', 'hydra', 'numpy'} & {*sys.modules}))"

    def ask(*arguments):
        return subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=True
        ).stdout

    assert ask(str(tmp_path)) == "1\n"
    before = cpu_seconds()
    assert ask(str(tmp_path), "0", "1", "3") == "75 again\n"
    assert cpu_seconds() - before < 0.4  # 0.07 where nothing else runs
    assert read_run(tmp_path).exit_code == 75


def test_the_interface_is_that_of_the_route():
    interface, address = find_route("127.0.0.1")
    assert (interface, address) == ("lo", "127.0.0.1")
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(OSError, match=r"there are: .*lo"):
        address_of("eth99")
    with pytest.raises(OSError, match=r"not known|No address"):
        find_route("no-such-machine.invalid", wait_seconds=0.0)


@pytest.mark.parametrize("name", ["a..b", ".local", "x" * 64])
def test_a_name_that_no_host_can_have_is_an_error_of_the_system(name):
    calls = (lambda: find_route(name), lambda: listen(name, 0), lambda: knock((name, 1), "", {}, {}, 1.0))
    for call in calls:
        with pytest.raises(OSError, match="no host can have the name"):
            call()
