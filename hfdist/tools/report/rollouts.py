"""Tables of the answers that a model has learned from, with their rewards: of one run, or of several side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from hfdist.secrets import mask_secrets
from hfdist.tools.report.drawing.chart import colour
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import escaped, escaped_lines, number

_MOST_OPEN, _MOST_ROWS = 8, 48
"""Most answers of one run that are seen at once, and most answers of it."""
_MOST_REWARDS = 8
"""Most rewards that have a column."""
_MOST_PROMPTS, _MOST_ANSWERS = 12, 2
"""Most prompts of a comparison of runs, and most answers of a run to each."""
_LONGEST = 300
"""Characters of a prompt or an answer."""
_MOST_TURNS, _LONGEST_TURN = 8, 150
"""Most turns of an episode with an environment, and characters of a turn."""

_Line = Mapping[str, object]
"""A line of rollouts.jsonl: a prompt, an answer and its rewards."""


class _Asked(NamedTuple):
    """A prompt at a step: two runs may have been asked the same."""

    step: float
    prompt: str


def rollouts(run: RunFiles) -> str:
    """Give a table as HTML of the newest answers, the last step's first, and a field that searches in them."""
    # The answers of a step keep the order of the file, so that answers to one prompt stay together.
    newest = sorted(run.rollouts, key=lambda line: -_step(line))[:_MOST_ROWS]
    if not newest:
        return ""
    keys = dict.fromkeys(key for line in newest for key in line if key == "reward" or key.startswith("rewards/"))
    reward_keys = list(keys)[:_MOST_REWARDS]
    more = _table(newest[_MOST_OPEN:], reward_keys)
    folded = f'<details id="rollouts-more"><summary>earlier answers</summary>{more}</details>' if more else ""
    field = _search_field("words, step>100, reward<0.5")
    title = "Answers and their rewards" if reward_keys else "Answers"
    return f"<h2>{title}</h2>{field}{_table(newest[:_MOST_OPEN], reward_keys)}{folded}"


def side_by_side(runs: Sequence[RunFiles]) -> str:
    """Give a table as HTML of the answers of several runs to the same prompt at the same step, the newest step first.

    It has the prompts that all runs with answers were asked. Words that the first run's answer lacks are marked.
    """
    answers_of_runs = {number: _by_prompt(run.rollouts) for number, run in enumerate(runs) if run.rollouts}
    if len(answers_of_runs) < 2:
        return ""
    first_run, *_ = answers_of_runs
    # In the order of the first run's file.
    shared = [asked for asked in answers_of_runs[first_run] if all(asked in own for own in answers_of_runs.values())]
    if not shared:
        return ""
    names = "".join(f'<th><i class="{colour(run)}"></i>{escaped(runs[run].name, 40)}</th>' for run in answers_of_runs)
    rows = ""
    for asked in sorted(shared, key=lambda one: -one.step)[:_MOST_PROMPTS]:
        cells = [f"{asked.step:,.0f}", f"<pre>{escaped_lines(asked.prompt, _LONGEST)}</pre>"]
        for run, answers in answers_of_runs.items():
            beside = [] if run == first_run else answers_of_runs[first_run][asked]
            cells.append(_answers(answers[asked], beside))
        rows += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    head = f"<thead><tr><th>step</th><th>prompt</th>{names}</tr></thead>"
    table = f'<table class="words rollouts">{head}<tbody>{rows}</tbody></table>'
    return f'<h2>Answers to the same prompts</h2>{_search_field("words, step>100")}<div class="scroll">{table}</div>'


def _by_prompt(lines: Iterable[_Line]) -> dict[_Asked, list[_Line]]:
    """Group a run's answers by what was asked, in the order of the file."""
    found: dict[_Asked, list[_Line]] = {}
    for line in lines:
        found.setdefault(_Asked(_step(line), str(line.get("prompt") or "")), []).append(line)
    return found


def _answers(lines: Sequence[_Line], others: Sequence[_Line]) -> str:
    """Give the first answers of a run to a prompt with their rewards.

    Args:
        lines: the run's answers.
        others: another run's answers; words that the answer in the same place lacks are marked.
    """
    cells = []
    for place, line in enumerate(lines[:_MOST_ANSWERS]):
        reward = number(line.get("reward"))
        note = "" if reward is None else f"<small>reward {reward:.4g}</small>"
        other = str(others[place].get("text") or "") if place < len(others) else None
        is_episode = isinstance(line.get("turns"), list)
        shown = _answer(line) if is_episode else f"<pre>{_marked(str(line.get('text') or ''), other)}</pre>"
        cells.append(f"{shown}{note}")
    return "".join(cells)


def _marked(text: str, other: str | None) -> str:
    """Give a text as HTML in which the words are marked that another text lacks there; None: nothing is marked."""
    if other is None:
        return escaped_lines(text, _LONGEST)
    # Secrets are masked before the texts are split and cut: a secret may have several words, or lie at the cut.
    text, other = mask_secrets(text[: 2 * _LONGEST]), mask_secrets(other[: 2 * _LONGEST])
    words, other_words = text[:_LONGEST].split(" "), other[:_LONGEST].split(" ")
    matcher = SequenceMatcher(None, other_words, words, autojunk=False)
    parts = []
    for kind, _, _, begin, end in matcher.get_opcodes():
        if begin < end:
            part = escaped_lines(" ".join(words[begin:end]), _LONGEST)
            parts.append(part if kind == "equal" else f"<mark>{part}</mark>")
    if len(text) > _LONGEST:
        parts.append("...")
    return " ".join(parts)


def _search_field(example: str) -> str:
    """Give a field in which the page's script searches the tables of the same part."""
    field = f'<input type="search" class="find" aria-label="Search the answers" placeholder="{escaped(example)}">'
    return f'<p>{field} <span class="found" role="status"></span></p>'


def _step(line: _Line) -> float:
    return number(line.get("step")) or 0.0


def _table(lines: Sequence[_Line], reward_keys: Sequence[str]) -> str:
    if not lines:
        return ""
    names = ["step", "prompt", "answer", *(key.removeprefix("rewards/") for key in reward_keys)]
    heads = "".join(f"<th>{escaped(name, 40)}</th>" for name in names)
    rows = "".join(_row(line, reward_keys) for line in lines)
    table = f'<table class="words rollouts"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _row(line: _Line, reward_keys: Sequence[str]) -> str:
    step = number(line.get("step"))
    prompt = f"<pre>{escaped_lines(line.get('prompt') or '', _LONGEST)}</pre>"
    cells = ["" if step is None else f"{step:,.0f}", prompt, _answer(line)]
    rewards = (number(line.get(key)) for key in reward_keys)
    cells += ["" if reward is None else f"{reward:.4g}" for reward in rewards]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _answer(line: _Line) -> str:
    """Give the answer of a line as HTML: its text, or the turns of an episode, each with its speaker.

    Turns that the model reads, and does not write, have another colour.
    """
    listed = line.get("turns")
    turns = [turn for turn in listed if isinstance(turn, dict)] if isinstance(listed, list) else []
    if not turns:
        return f"<pre>{escaped_lines(line.get('text') or '', _LONGEST)}</pre>"
    drawn = ""
    for turn in turns[:_MOST_TURNS]:
        kind = "" if turn.get("role") == "assistant" else ' class="observed"'
        speaker = " ".join(str(turn[key]) for key in ("role", "name") if turn.get(key))
        text = escaped_lines(turn.get("text") or "", _LONGEST_TURN)
        drawn += f"<small>{escaped(speaker, 40)}</small><pre{kind}>{text}</pre>"
    if len(turns) > _MOST_TURNS:
        drawn += f"<small>{len(turns) - _MOST_TURNS} more turns</small>"
    return drawn
