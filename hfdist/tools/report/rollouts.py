"""The answers that a model has learned from, with their rewards: a table for one run, and one that compares runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from itertools import groupby

from hfdist.secrets import mask_secrets
from hfdist.tools.report.drawing.chart import colour
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import escaped, escaped_lines, number

_MOST_OPEN, _MOST_ROWS = 8, 48
"""Most answers of one run: those that are seen at once, and all."""
_MOST_REWARDS = 8
_MOST_PROMPTS, _MOST_ANSWERS = 12, 2
"""Most prompts of a comparison of runs, and most answers of a run to each."""
_LONGEST = 300
"""Characters of a prompt or an answer."""
_MOST_TURNS, _LONGEST_TURN = 8, 150
"""Most turns of an episode with an environment, and characters of a turn."""

_Line = Mapping[str, object]


def rollouts(run: RunFiles) -> str:
    """Give a table of the newest answers, those of the last logged step first, and a field that searches them."""
    # The answers of a step keep the order of the file, so that those to one prompt stay together.
    newest = sorted(run.rollouts, key=lambda line: -_step(line))[:_MOST_ROWS]
    if not newest:
        return ""
    keys = list(dict.fromkeys(key for line in newest for key in line if key == "reward" or key.startswith("rewards/")))
    keys = keys[:_MOST_REWARDS]
    more = _table(newest[_MOST_OPEN:], keys)
    folded = f'<details id="rollouts-more"><summary>earlier answers</summary>{more}</details>' if more else ""
    field = _search("words, step>100, reward<0.5")
    title = "Answers and their rewards" if keys else "Answers"
    return f"<h2>{title}</h2>{field}{_table(newest[:_MOST_OPEN], keys)}{folded}"


def side_by_side(runs: Sequence[RunFiles]) -> str:
    """Give a table of what two runs and more have answered to the same prompt at the same step, the newest first.

    Words that the first run's answer in that place does not have are marked.
    """
    answered = [_by_prompt(run.rollouts) for run in runs]
    places = [place for place, own in enumerate(answered) if own]
    asked = sorted(set.intersection(*(set(answered[place]) for place in places)) if len(places) > 1 else ())
    if not asked:
        return ""
    names = "".join(f'<th><i class="{colour(place)}"></i>{escaped(runs[place].name, 40)}</th>' for place in places)
    rows = ""
    # The newest step first; the prompts of a step in the order of the file.
    order = {key: place for place, key in enumerate(answered[places[0]])}
    for step, prompt in sorted(asked, key=lambda key: (-key[0], order[key]))[:_MOST_PROMPTS]:
        first = answered[places[0]][step, prompt]
        cells = [_answers(answered[place][step, prompt], first if place != places[0] else []) for place in places]
        texts = [f"{step:,.0f}", f"<pre>{escaped_lines(prompt, _LONGEST)}</pre>", *cells]
        rows += f"<tr>{''.join(f'<td>{text}</td>' for text in texts)}</tr>"
    head = f"<thead><tr><th>step</th><th>prompt</th>{names}</tr></thead>"
    table = f'<table class="words rollouts">{head}<tbody>{rows}</tbody></table>'
    return f'<h2>Answers to the same prompts</h2>{_search("words, step>100")}<div class="scroll">{table}</div>'


def _by_prompt(lines: Sequence[_Line]) -> dict[tuple[float, str], list[_Line]]:
    """Group answers by step and prompt."""
    found: dict[tuple[float, str], list[_Line]] = {}
    for key, own in groupby(lines, key=lambda line: (_step(line), str(line.get("prompt") or ""))):
        found.setdefault(key, []).extend(own)
    return found


def _answers(lines: Sequence[_Line], others: Sequence[_Line]) -> str:
    """Give some answers with their rewards, each beside the other run's in the same place."""
    cells = []
    for place, line in enumerate(lines[:_MOST_ANSWERS]):
        reward = number(line.get("reward"))
        note = "" if reward is None else f"<small>reward {reward:.4g}</small>"
        other = str(others[place].get("text") or "") if place < len(others) else None
        is_episode = isinstance(line.get("turns"), list)
        shown = _said(line) if is_episode else f"<pre>{_marked(str(line.get('text') or ''), other)}</pre>"
        cells.append(f"{shown}{note}")
    return "".join(cells)


def _marked(text: str, other: str | None) -> str:
    """Give a text with the words marked that the text `other` does not have there; None: nothing is marked."""
    if other is None:
        return escaped_lines(text, _LONGEST)
    # Before the text is split: a secret may have several words.
    text, other = (mask_secrets(one[: 2 * _LONGEST]) for one in (text, other))
    words, others = text[:_LONGEST].split(" "), other[:_LONGEST].split(" ")
    matcher = SequenceMatcher(None, others, words, autojunk=False)
    parts = []
    for kind, _, _, begin, end in matcher.get_opcodes():
        if begin < end:
            own = escaped_lines(" ".join(words[begin:end]), _LONGEST)
            parts.append(own if kind == "equal" else f"<mark>{own}</mark>")
    return " ".join(parts) + (" ..." if len(text) > _LONGEST else "")


def _search(example: str) -> str:
    """Give a field in which script.js searches the tables of its part."""
    field = f'<input type="search" class="find" aria-label="Search the answers" placeholder="{escaped(example)}">'
    return f'<p>{field} <span class="found" role="status"></span></p>'


def _step(line: _Line) -> float:
    return number(line.get("step")) or 0.0


def _table(lines: Sequence[_Line], keys: list[str]) -> str:
    if not lines:
        return ""
    names = ["step", "prompt", "answer", *(key.removeprefix("rewards/") for key in keys)]
    heads = "".join(f"<th>{escaped(name, 40)}</th>" for name in names)
    rows = "".join(_row(line, keys) for line in lines)
    table = f'<table class="words rollouts"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _row(line: _Line, keys: list[str]) -> str:
    step = number(line.get("step"))
    prompt = f"<pre>{escaped_lines(line.get('prompt') or '', _LONGEST)}</pre>"
    cells = ["" if step is None else f"{step:,.0f}", prompt, _said(line)]
    rewards = (number(line.get(key)) for key in keys)
    cells += ["" if reward is None else f"{reward:.4g}" for reward in rewards]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _said(line: _Line) -> str:
    """Give the answer; of an episode each turn with its speaker, with what the model reads in another colour."""
    listed = line.get("turns")
    turns = [turn for turn in listed if isinstance(turn, dict)] if isinstance(listed, list) else []
    if not turns:
        return f"<pre>{escaped_lines(line.get('text') or '', _LONGEST)}</pre>"
    said = ""
    for turn in turns[:_MOST_TURNS]:
        own = "" if turn.get("role") == "assistant" else ' class="observed"'
        speaker = " ".join(str(turn[key]) for key in ("role", "name") if turn.get(key))
        text = escaped_lines(turn.get("text") or "", _LONGEST_TURN)
        said += f"<small>{escaped(speaker, 40)}</small><pre{own}>{text}</pre>"
    more = len(turns) - _MOST_TURNS
    return said + (f"<small>{more} more turns</small>" if more > 0 else "")
