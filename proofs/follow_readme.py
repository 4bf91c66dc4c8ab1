"""Follow README from its first command to its last in a fresh clone and a fresh environment, as a new user would.

python proofs/follow_readme.py FOLDER [OVERRIDE ...]

Runs every command line of README's blocks that needs no model of the Hub, no bucket and no files of the user's, in
order and in one shell, in FOLDER/clone; and then those of each page of docs/, without the runs of the pages before.
Overrides, such as `train.max_steps=12`, are added to each that trains. It ends with the exit code of the first command
that fails.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGINS = ("python3 -m venv", "pip install", "hfdist ", "accelerate launch --config_file")
# A model of the Hub, a bucket, files that only the user has, another package, what is left to the reader, or commands
# that wait for each other (test_islands.py).
ELSEWHERE = ("model.name=", "+experiment=", "/data/", "s3://", "...", "--rdzv", ".[trl]",
             "hfdist serve", "islands.address")  # fmt: skip
TRAINS = ("hfdist pretrain ", "hfdist prove ", "accelerate launch")


def pages(root: Path) -> list[Path]:
    """README and the pages of docs/ that show commands to follow."""
    return [path for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))) if shown_commands(path)]


def shown_commands(page: Path) -> list[str]:
    """Each command of a page's blocks on a line of its own, in order."""
    blocks = page.read_text(encoding="utf-8").split("```")[1::2]
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    begins = (*BEGINS, *(f"python {name}" for name in shown_programs(page)))
    return [line for line in lines if line.startswith(begins) and not any(part in line for part in ELSEWHERE)]


def shown_programs(page: Path) -> dict[str, str]:
    """The programs that a page shows, by the names in their first lines."""
    programs = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return dict(programs)


def script_for(page: Path, texts: Path, overrides: list[str]) -> str:
    """What bash is to run: each command is shown, and then done."""
    script = []
    for line in shown_commands(page):
        line = line.partition("  #")[0].replace("/texts/*.parquet", str(texts))
        if line.startswith(TRAINS) and not any(name in line for name in shown_programs(page)):
            line = " ".join([line, *overrides])
        script += [f"echo {shlex.quote(line)}", line]
    return "\n".join(script)


def main() -> None:
    """Clone, write one script, and run it."""
    folder, *overrides = sys.argv[1:]
    clone = Path(folder).absolute() / "clone"
    texts = clone.with_name("texts.jsonl")
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    texts.write_text("".join(f'{{"text": "number {number} {"word " * 400}"}}\n' for number in range(2000)))
    script = []
    for page in pages(clone):
        for name, program in shown_programs(page).items():
            (clone / name).write_text(program, encoding="utf-8")
        script += [f"echo {shlex.quote(f'== {page.relative_to(clone)}')}", script_for(page, texts, overrides)]
        script.append("rm -rf runs")
    # As an argument: a command could read the rest of a script that is bash's input.
    done = subprocess.run(["bash", "-euc", "\n".join(script)], stdin=subprocess.DEVNULL, cwd=clone, check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
