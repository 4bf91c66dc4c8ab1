"""A process that reads data ahead and is killed, wherever its rank is meanwhile: one message, with what is known."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from hfdist.data.stream.worker_deaths import Vitals, system_memory
from hfdist.errors import ResourceError
from tests.unit.data.streams import memory_config, memory_corpus
from tests.unit.data.test_stream import TokenStream, tokenizer


def workers_of_this_process():
    return [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]


@pytest.mark.parametrize("rank_is", ["computing", "waiting"])
def test_a_killed_worker_is_named_with_its_lanes_and_its_memory(tmp_path, rank_is):
    config = memory_config(tmp_path, workers=2, lanes=4)
    stream = TokenStream(memory_corpus(config), tokenizer(), config)
    batches = iter(stream.loader(micro_batch_size=4))
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
    with pytest.raises(RuntimeError, match="another"), Vitals(1, str).told():
        raise RuntimeError("another")


def test_control_groups_of_both_kinds_are_read(tmp_path, monkeypatch):
    for name, text in {
        "memory.max": "1048576000",
        "memory.current": "524288000",
        "memory.events": "oom 3\noom_kill 2",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("hfdist.data.stream.worker_deaths._CGROUPS", tmp_path)
    monkeypatch.setattr("hfdist.data.stream.worker_deaths._own_groups", lambda: ["1:name=x:/", "0::/"])
    assert "uses 500 MiB of 1,000 MiB, its processes killed for memory so far: 2" in system_memory()
    (tmp_path / "memory.max").write_text("max")
    assert "group" not in system_memory()
    (tmp_path / "memory" / "job").mkdir(parents=True)
    texts = {
        "memory.limit_in_bytes": "1048576000",
        "memory.usage_in_bytes": "1048576",
        "memory.oom_control": "oom_kill 1",
    }
    for name, text in texts.items():
        (tmp_path / "memory" / "job" / name).write_text(text)
    monkeypatch.setattr("hfdist.data.stream.worker_deaths._own_groups", lambda: ["4:memory:/job", "0::/"])
    assert "uses 1 MiB of 1,000 MiB, its processes killed for memory so far: 1" in system_memory()
