"""A process that reads data ahead and is killed, wherever its rank is meanwhile: one message, with what is known."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from hfdist.data.stream.workers import Vitals, system_memory
from hfdist.errors import ResourceError
from tests.unit.data.streams import memory_config, memory_corpus
from tests.unit.data.test_stream import TokenStream, tokenizer


def workers_of_this_process():
    return [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]


@pytest.mark.parametrize("rank_is", ["computing", "waiting"])
def test_a_killed_worker_is_named_with_its_lanes_and_its_memory(tmp_path, rank_is):
    config = memory_config(tmp_path, workers=2, lanes=4)
    stream = TokenStream(memory_corpus(config), tokenizer(), config)
    batches = iter(stream.loader(batch_size=4))
    next(batches)
    _, second = workers_of_this_process()[-2:]
    with pytest.raises(ResourceError) as caught:
        os.kill(second, signal.SIGKILL)
        if rank_is == "computing":
            for _ in range(1000):
                time.sleep(0.01)
        else:
            while True:
                next(batches)
    message = str(caught.value)
    assert caught.value.exit_code == 7
    assert f"pid {second}" in message or f"pid(s) {second}" in message
    assert re.search(r"worker 1 of 2, which reads lanes 1, 3, ", message)
    assert int(re.search(r"3, ([\d,]+) MiB when last seen", message)[1].replace(",", "")) > 20
    assert re.search(r"the machine has [\d,]+ MiB left of [\d,]+ MiB", message)
    for key in re.findall(r"data\.(\w+)", caught.value.hint):
        assert hasattr(config, key)
    batches.close()


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="another"), Vitals(1, str).explain_deaths():
        raise RuntimeError("another")


def test_control_groups_of_both_kinds_are_read(tmp_path, monkeypatch):
    def write(folder, **texts):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / f"memory.{name}").write_text(text)

    own = tmp_path / "own"
    own.write_text("1:name=x:/\n0::/\n")
    write(tmp_path, max="1048576000", current="524288000", events="oom 3\noom_kill 2")
    monkeypatch.setattr("hfdist.data.stream.workers._CGROUPS", tmp_path)
    monkeypatch.setattr("hfdist.data.stream.workers._OWN_CGROUPS", own)
    assert "uses 500 MiB of 1,000 MiB, its processes killed for memory so far: 2" in system_memory()
    write(tmp_path, max="max")
    assert "group" not in system_memory()
    write(tmp_path / "memory" / "job", limit_in_bytes="1048576000", usage_in_bytes="1048576", oom_control="oom_kill 1")
    own.write_text("4:memory:/job\n0::/\n")
    assert "uses 1 MiB of 1,000 MiB, its processes killed for memory so far: 1" in system_memory()
