"""The part of a report about rollouts: answers of a model that is trained by rewards, with their rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import escaped, escaped_lines, number

_MOST_OPEN, _MOST_ROWS = 8, 24
_MOST_REWARDS = 8
_LONGEST = 300


def rollouts(run: RunFiles) -> str:
    """Give a table of the newest answers, those of the last logged step first."""
    # Of a step, in the order of the file: a prompt's answers stay together.
    newest = sorted(run.rollouts, key=lambda line: -(number(line.get("step")) or 0.0))[:_MOST_ROWS]
    if not newest:
        return ""
    keys = list(dict.fromkeys(key for line in newest for key in line if key == "reward" or key.startswith("rewards/")))
    keys = keys[:_MOST_REWARDS]
    more = _table(newest[_MOST_OPEN:], keys)
    folded = f'<details id="rollouts-more"><summary>earlier answers</summary>{more}</details>' if more else ""
    return f"<h2>Answers and their rewards</h2>{_table(newest[:_MOST_OPEN], keys)}{folded}"


def _table(lines: Sequence[Mapping[str, object]], keys: list[str]) -> str:
    if not lines:
        return ""
    names = ["step", "prompt", "answer", *(key.removeprefix("rewards/") for key in keys)]
    heads = "".join(f"<th>{escaped(name, 40)}</th>" for name in names)
    rows = "".join(_row(line, keys) for line in lines)
    table = f'<table class="words rollouts"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _row(line: Mapping[str, object], keys: list[str]) -> str:
    step = number(line.get("step"))
    texts = (escaped_lines(line.get(key) or "", _LONGEST) for key in ("prompt", "text"))
    cells = ["" if step is None else f"{step:,.0f}", *(f"<pre>{text}</pre>" for text in texts)]
    rewards = (number(line.get(key)) for key in keys)
    cells += ["" if reward is None else f"{reward:.4g}" for reward in rewards]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
