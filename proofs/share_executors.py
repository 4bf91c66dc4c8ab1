"""Run the programs of docs/data.md that share `hfdist pretokenize`: `python -m proofs.share_executors PYTHON`.

`make shares` does it. PYTHON has Ray and datatrove, which the tests' environment has not. The process that writes the
second file of a share is killed. Ray starts the task again; datatrove's program is started again. The folder must then
be that of one process, byte for byte, and every file that was finished must have been kept.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path

import psutil

from proofs.follow_readme import shown_programs

ROOT = Path(__file__).resolve().parents[1]
NUM_FILES, NUM_ROWS, NUM_SHARES = 8, 400, 4
LONGEST_SECONDS = 600
PROGRAMS = {"on_ray.py": True, "in_datatrove.py": False}
"""Programs of the page, and whether they start a killed task again themselves."""


def write_corpus(folder: Path) -> None:
    """Write files of rows that are large enough for token files of their own: modules of the standard library, cut."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    rows = cycle([json.dumps({"text": path.read_text(encoding="utf-8")[:3000]}) for path in modules])
    folder.mkdir()
    for number in range(NUM_FILES):
        (folder / f"{number:02d}.jsonl").write_text("\n".join(islice(rows, NUM_ROWS)) + "\n")


def contents(tokens: Path) -> dict[Path, bytes]:
    """Read all files of the folder, but locks."""
    files = (path for path in tokens.rglob("*") if path.is_file() and not path.name.startswith(".lock"))
    return {path.relative_to(tokens): path.read_bytes() for path in files}


def find_holder(lock: Path, program: subprocess.Popen[bytes]) -> psutil.Process | None:
    """Find the process of a program that has a lock open."""
    for process in psutil.Process(program.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if any(file.path == str(lock) for file in process.open_files()):
                return process
    return None


def kill_first_share(program: subprocess.Popen[bytes], tokens: Path) -> dict[Path, int]:
    """Kill who does share 0 in its second file; give when each finished file was written."""
    until = time.monotonic() + LONGEST_SECONDS
    lock, victim = tokens / f".lock-0-of-{NUM_SHARES}", None
    while victim is None or not (tokens / "00000.json").is_file():
        assert program.poll() is None, "the program has ended"
        assert time.monotonic() < until, "the first file was not written"
        victim = victim or (find_holder(lock, program) if lock.exists() else None)
        time.sleep(0.01)
    victim.kill()
    assert not (tokens / f"{NUM_SHARES:05d}.json").exists(), "the kill came too late"
    # A record comes last.
    return {(path := record.with_suffix(".tokens")): path.stat().st_mtime_ns for record in tokens.glob("0*.json")}


def run_and_kill(command: list[str], tokens: Path, *, starts_again: bool, environment: dict[str, str]) -> int:
    """Run a program, kill a task of it, and let it be done; give how many files were finished before."""
    with subprocess.Popen(command, env=environment, start_new_session=True) as program:
        try:
            written = kill_first_share(program, tokens)
            if starts_again:
                assert program.wait(LONGEST_SECONDS) == 0
        finally:
            # datatrove's pool waits for a killed process without end.
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
    if not starts_again:
        subprocess.run(command, env=environment, check=True, timeout=LONGEST_SECONDS)
    assert {path: path.stat().st_mtime_ns for path in written} == written, "a finished file was written again"
    return len(written)


def main() -> None:
    """Compare each program's folder with that of one process."""
    peers = sys.argv[1] if len(sys.argv) == 2 else sys.exit(__doc__)
    given = {"PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")]), "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_corpus(folder / "texts")
        source, environment = f"{folder}/texts/*.jsonl", {**os.environ, **given, "OMP_NUM_THREADS": "1"}
        overrides = ["data=files", f'data.sources.files.path="{source}"', f"run.dir={folder}/one", "report=quiet"]
        of_one = environment | {"HFDIST_CACHE": f"{folder}/cache"}
        subprocess.run([sys.executable, "-m", "hfdist", "pretokenize", *overrides], env=of_one, check=True)
        one = contents(folder / "one" / "tokens")
        assert len([path for path in one if path.suffix == ".tokens"]) == NUM_FILES
        for name, starts_again in PROGRAMS.items():
            # Each has caches of its own, as machines have.
            shared, cache = folder / name.removesuffix(".py"), {"HFDIST_CACHE": f"{folder}/cache of {name}"}
            text = shown_programs(ROOT / "docs" / "data.md")[name]
            for shown, here in (("/texts/*.parquet", source), ("/shared", str(shared)), ("64", str(NUM_SHARES))):
                assert shown in text, f"{name} has no {shown}"
                text = text.replace(shown, here)
            program, tokens = folder / name, shared / "texts" / "tokens"
            program.write_text(text)
            kept = run_and_kill(
                [peers, str(program)], tokens, starts_again=starts_again, environment=environment | cache
            )
            assert contents(tokens) == one, f"{name}: other files"
            sys.stdout.write(f"{name}: the bytes of one process; {kept} of {NUM_FILES} files were kept at the kill\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
