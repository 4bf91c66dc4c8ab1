"""Run the program of docs/generators.md whose Ray actors are generators: `python -m proofs.ray_generators PYTHON`.

`make ray` does it. PYTHON has Ray, which the tests' environment has not. One of two actors is killed while the run
trains, and Ray starts it again. The run must train each prompt once, and have the losses of a run whose ranks answer.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from hfdist.messages.door import SECRET
from hfdist.records import RunFolder, read_lines
from proofs.follow_readme import shown_programs

ROOT = Path(__file__).resolve().parents[1]
NUM_ACTORS, STEPS, PROMPTS = 2, 12, 4
LONGEST_SECONDS = 900
NO_RUN = 6
"""Exit code of a generator whose run does not answer."""
NEAR = 1e-5
"""The largest distance of two losses that counts as none."""


def write_sums(path: Path) -> None:
    """Write sums of one digit with their last digit."""
    sums = [(number % 10, number // 10 % 10) for number in range(200)]
    rows = [{"prompt": f"{first}+{second}=", "completion": str((first + second) % 10)} for first, second in sums]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def command(folder: Path, *overrides: str) -> list[str]:
    """Give the command of a run in `folder`."""
    own = (
        "task=grpo",
        "model=tiny",
        f"data={folder.parent / 'sums.jsonl'}",
        "data.sequence_length=32",
        "data.lanes=4",
        "data.workers=0",
        "train.epochs=null",
        f"train.max_steps={STEPS}",
        f"train.global_batch_size={PROMPTS}",
        "train.micro_batch_size=2",
        "task.rewards={arithmetic: 1.0, overlong: 1.0}",
        "task.max_new_tokens=8",
        "optimizer.lr=1e-3",
        "checkpoint=none",
        "report=quiet",
        "report.log_every=1",
        f"run.dir={folder}",
    )
    return [sys.executable, "-m", "hfdist", "tune", *own, *overrides]


def program(port: int) -> str:
    """Give the program of the page, for actors without GPUs that join at `port`."""
    text = shown_programs(ROOT / "docs" / "generators.md")["generate_on_ray.py"]
    here = (("num_gpus=1", "num_cpus=0"), ("HOST:29700", f"127.0.0.1:{port}"), ("range(4)", f"range({NUM_ACTORS})"))
    # Not the ten minutes for which a generator tries a run that has ended.
    waits = ('f"join={run}"', 'f"join={run}", "wait_seconds=30"')
    for shown, own in (*here, waits, ("ray.init()", f"ray.init(num_cpus={NUM_ACTORS})")):
        assert shown in text, f"the program has no {shown}"
        text = text.replace(shown, own)
    return text


def free_port() -> int:
    """Give a port that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def kill_actor(actors: subprocess.Popen[bytes], run: subprocess.Popen[bytes], folder: RunFolder) -> int:
    """Kill the process of an actor once two steps are trained; give how many prompts were trained before."""
    until = time.monotonic() + LONGEST_SECONDS
    while (trained := len(read_lines(folder.rollouts_ledger))) < 2 * PROMPTS:
        assert run.poll() is None, "the run has ended"
        assert actors.poll() is None, "the program has ended"
        assert time.monotonic() < until, "no step was trained"
        time.sleep(0.05)
    serving = [one for one in psutil.Process(actors.pid).children(recursive=True) if "generate" in one.cmdline()]
    parent = serving[0].parent()
    assert parent is not None
    parent.kill()
    return trained


def losses(folder: RunFolder) -> list[float]:
    """Give the loss of each step."""
    return [line["loss"] for line in read_lines(folder.metrics) if "loss" in line]


def train_with_actors(peers: str, folder: Path, environment: dict[str, str]) -> int:
    """Train with actors as generators; give how many prompts were trained before one of them was killed."""
    port = free_port()
    own = environment | {SECRET: secrets.token_hex(16)}
    written = folder.parent / "generate_on_ray.py"
    written.write_text(program(port))
    remote = (f"task.generators_port={port}", "task.generators_host=127.0.0.1", "task.max_staleness=0")
    started: list[subprocess.Popen[bytes]] = []
    try:
        run = subprocess.Popen(command(folder, *remote), env=own)
        started.append(run)
        actors = subprocess.Popen([peers, str(written)], env=own, stdout=subprocess.PIPE)
        started.append(actors)
        trained = kill_actor(actors, run, RunFolder(folder))
        assert run.wait(LONGEST_SECONDS) == 0, "the run has failed"
        said, _ = actors.communicate(timeout=LONGEST_SECONDS)
        codes = json.loads(said.decode().rpartition("exit codes ")[2])
        # The one that was started again may have come after the end of the training.
        assert sorted(codes) in ([0, 0], [0, NO_RUN]), said.decode()
        return trained
    finally:
        end(started)


def end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill what is still there, and its children."""
    for process in started:
        if process.poll() is None:
            for child in (*psutil.Process(process.pid).children(recursive=True), process):
                child.kill()
            process.wait()


def main() -> None:
    """Compare the run whose generators are actors with one whose ranks answer."""
    peers = sys.argv[1] if len(sys.argv) == 2 else sys.exit(__doc__)
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        own = {
            "PATH": path,
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            # On a busy machine Ray takes longer to start than it waits by itself.
            "RAY_raylet_start_wait_time_s": "300",
            "HFDIST_CACHE": str(place / "cache"),
        }
        environment = os.environ | own
        write_sums(place / "sums.jsonl")
        subprocess.run(command(place / "plain"), env=environment, check=True, timeout=LONGEST_SECONDS)
        trained = train_with_actors(peers, place / "run", environment)
        of_actors, of_ranks = losses(RunFolder(place / "run")), losses(RunFolder(place / "plain"))
        farthest = max(abs(one - other) for one, other in zip(of_actors, of_ranks, strict=True))
        assert farthest < NEAR, f"losses are {farthest} apart"
        assert len(set(of_ranks)) > STEPS // 2, "these runs have learned nothing"
        answers = [read_lines(RunFolder(place / name).rollouts) for name in ("run", "plain")]
        assert answers[0] == answers[1], "other answers"
        numbers = [line["number"] for line in read_lines(RunFolder(place / "run").rollouts_ledger)]
        assert numbers == list(range(STEPS * PROMPTS)), "a prompt was lost or repeated"
        sys.stdout.write(
            f"{NUM_ACTORS} actors, one killed after {trained} of {len(numbers)} prompts: each prompt once, "
            f"{STEPS} losses at most {farthest:.1e} from those of ranks that answer\n"
        )


if __name__ == "__main__":
    main()
