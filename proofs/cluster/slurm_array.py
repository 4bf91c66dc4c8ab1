"""What a real SLURM does with an array that shares the files of a corpus: two tasks side by side, one machine lost."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

from proofs.cluster.slurm_stories import Jobs
from proofs.cluster.story import Story

_NAME, _TASKS, _FILES = "shared", 2, 16
# So many rows have a token file of their own.
_ROWS, _WORDS_OF_ROW, _WORDS = 300, 200, 5000
_POLL_SECONDS = 0.02
"""A file is made in a tenth of a second."""
_MOST_SECONDS = 600


def shared_tokens(jobs: Jobs) -> Story:
    """The machine of one task loses its power after the first of that task's files."""
    cluster, tokens = jobs.cluster, jobs.run_dir(_NAME) / "tokens"
    words = ["model=tiny", "data=files", f"data.sources.files.path={_write_texts(jobs.folder / 'texts')}/*.jsonl",
             "data.workers=0", "report.progress=false"]  # fmt: skip
    path = jobs.write_words(_NAME, "recipe=pretokenize", *words, f"run.dir={jobs.run_dir(_NAME)}")
    number = jobs.submit(path)
    tasks = [f"{number}_{task}" for task in range(_TASKS)]
    cluster.wait_until(lambda: all(cluster.state(task) == "RUNNING" for task in tasks), "two tasks that run")
    machine = cluster.machines[1]
    lost = next(task for task, one in enumerate(tasks) if cluster.show(one)["NodeList"] == machine.name)
    own = range(lost, _FILES, _TASKS)
    deadline = time.monotonic() + _MOST_SECONDS
    while not _finished(tokens, own):
        assert time.monotonic() < deadline, cluster.run("squeue")
        time.sleep(_POLL_SECONDS)
    cluster.cut_power(machine)
    kept = {file: file.stat().st_mtime_ns for file in _finished(tokens, own)}
    assert len(kept) < len(own), "the task was over before its machine was lost"
    cluster.wait_until(lambda: cluster.state(tasks[lost]) == "PENDING", "a lost task is requeued")
    cluster.give_power(machine)
    cluster.wait_until(
        lambda: all(cluster.state(task) == "COMPLETED" for task in tasks), "the end of both tasks", _MOST_SECONDS
    )
    assert {file: file.stat().st_mtime_ns for file in kept} == kept, "a file that was finished was made again"
    alone = [sys.executable, "-m", "hfdist", "pretokenize", *words, f"run.dir={jobs.run_dir('one')}"]
    subprocess.run(alone, check=True, cwd=jobs.folder, stdout=subprocess.DEVNULL)
    made, expected = (_contents(folder) for folder in (tokens, jobs.run_dir("one") / "tokens"))
    assert made == expected, f"other files than those of one process: {sorted(_different(made, expected))}"
    requeues = [cluster.show(task)["Restarts"] for task in tasks]
    assert requeues[lost] == "1", requeues
    megabytes = sum(map(len, made.values())) / 1e6
    return Story(
        "An array that shares the files of a corpus",
        f"`hfdist job to=slurm recipe=pretokenize cluster.nodes={_TASKS}`: two tasks side by side, of "
        f"{len(own)} token files each. The machine of one loses its power when a file of that task is finished, and "
        "comes back when SLURM has seen it.",
        [],
        f"Both tasks are COMPLETED; requeues: {' and '.join(requeues)}. Files of the lost task that were finished and "
        f"kept: {len(kept)} of {len(own)}. All {len(made)} files, {megabytes:.1f} MB, are those of one process, byte "
        "for byte.",
    )


def _write_texts(folder: Path) -> Path:
    """JSON lines of words that a tokenizer does not know yet."""
    folder.mkdir()
    chosen = random.Random(0)
    words = ["".join(chosen.choices("abcdefghijklmnopqrstuvwxyz", k=chosen.randint(3, 9))) for _ in range(_WORDS)]
    for number in range(_FILES):
        rows = (" ".join(chosen.choices(words, k=_WORDS_OF_ROW)) for _ in range(_ROWS))
        lines = (json.dumps({"text": row}) for row in rows)
        (folder / f"{number}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def _finished(tokens: Path, numbers: range) -> list[Path]:
    """Token files whose record is there: it is written last."""
    return [tokens / f"{one:05d}.tokens" for one in numbers if (tokens / f"{one:05d}.json").is_file()]


def _contents(folder: Path) -> dict[str, bytes]:
    """All files by their names, but for locks."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _different(made: dict[str, bytes], expected: dict[str, bytes]) -> set[str]:
    return {name for name in made.keys() | expected.keys() if made.get(name) != expected.get(name)}
