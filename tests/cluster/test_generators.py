"""Ranks and generators on two machines: each prompt is trained once, also where a machine is gone without a word."""

import sys
import time

import pytest

from hfdist.messages.door import SECRET
from tests.cluster.runs import ROOT
from tests.distributed import policy_runs
from tests.distributed.policy_runs import each_once, trained_prompts
from tests.distributed.preference_runs import COMMON

pytestmark = [pytest.mark.distributed, pytest.mark.e2e, pytest.mark.many, pytest.mark.timeout(300)]

PORT = 29788
SECONDS = 120


def test_generators_of_another_machine_and_a_link_that_is_cut(tmp_path, cache_dir, machines):
    here, there = machines
    steps, policy = 60, policy_runs.write_model(tmp_path / "model")
    sums = policy_runs.write_sums(tmp_path / "sums.jsonl")
    own = (
        f"model.name={policy}", f"model.tokenizer.name={policy}", f"data.sources.files.path={sums}",
        f"run.dir={tmp_path / 'run'}", "task=grpo", *policy_runs.COMMON, f"task.generators_port={PORT}",
        "task.max_staleness=0", f"train.max_steps={steps}", "train.eval_every=null",
    )  # fmt: skip
    environment = {SECRET: "known to all", "PYTHONPATH": str(ROOT)}

    def start(machine, log, *words, **more):
        command = [sys.executable, "-m", "hfdist", *words]
        return machine.start(command, tmp_path / log, **environment, **more)

    join = ("generate", f"join={here.address}:{PORT}", "wait_seconds=100")
    run = start(here, "log", "tune", *COMMON, *own)
    near, far = start(here, "near", *join), start(there, "far", *join)
    deadline = time.monotonic() + SECONDS
    # Both are in the middle of it.
    while not all("version" in (tmp_path / log).read_text() for log in ("near", "far")):
        assert run.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    there.set_link(up=False)
    assert run.wait(SECONDS) == 0, (tmp_path / "log").read_text()
    assert near.wait(SECONDS) == 0
    far.kill()
    far.wait()
    assert f"of {there.address} has gone" in (tmp_path / "log").read_text()
    assert trained_prompts(tmp_path / "run") == each_once(steps)
