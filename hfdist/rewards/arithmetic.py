"""The reward `arithmetic`: whether the final answer of a text is the number of its reference."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from hfdist.errors import DataError
from hfdist.rewards.generation import Generation

_LONGEST = 1000
"""Characters of a number. A longer one is no answer: its arithmetic could take minutes."""

# A power of ten of few digits: arithmetic with a larger one could take minutes.
_POWER = r"(?:[eE][-+]?[0-9]{1,3}(?!\w))?"
_UNSIGNED = rf"(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?{_POWER}|(?<![\w.])\.[0-9]+{_POWER}"
_NUMBER = re.compile(
    # A minus after a word or a bracket subtracts: it is no sign.
    rf"(?P<sign>(?<![\w)])[-\N{{MINUS SIGN}}])?[$€£]?(?P<inner>(?<=[$€£])-)?(?<![\w])"
    rf"(?:(?P<whole>[0-9]+)[ \t]+(?=[0-9]+\s*/\s*[0-9]))?(?P<top>{_UNSIGNED})"
    rf"(?:\s*/\s*(?P<bottom>{_UNSIGNED}))?(?P<percent>\s*%)?"
)
_MARKER = re.compile(r"(?<![<>!=])=(?!=)|answer\s+is", re.IGNORECASE)
_FRACTION = re.compile(
    r"\\[dt]?frac\s*(?:\{\s*(-?[0-9.,]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9.,]+)\s*\}|([0-9]))",
)
_MIXED = re.compile(r"(?<=[0-9])\s*(?=\\[dt]?frac)")
"""Between a whole number and the fraction that is added to it."""
_LATEX = (("{,}", ","), ("\\,", ""), ("\\!", ""), ("\\$", "$"), ("\\%", "%"))
"""Notation of LaTeX, and the same in plain text."""


@dataclass(frozen=True)
class Answer:
    """A number, and whether a percent sign stands after it."""

    value: Fraction
    is_percent: bool = False

    def equals(self, other: Answer) -> bool:
        """Compare exactly; a percent sign on one side alone is a unit or a hundredth: 50% is 50 and 0.5."""
        if self.is_percent == other.is_percent:
            return self.value == other.value
        percent, plain = (self, other) if self.is_percent else (other, self)
        return plain.value in (percent.value, percent.value / 100)


def arithmetic(generations: Sequence[Generation]) -> list[float]:
    r"""Give 1.0 where the final answer of the text is the reference's as a number, else 0.0.

    The final answer is the number in the last \boxed{}; else after the last `####`; else after the last `=` or
    `answer is`; else the last number. References have the same forms.

    Raises:
        DataError: a reference has no number.
    """
    scores = []
    for one in generations:
        wanted, found = final_answer(one.reference), final_answer(one.text)
        if wanted is None:
            what, allowed = "a reference has no number", "a number, or a worked answer that ends in one"
            raise DataError(what, where="reward arithmetic", found=one.reference, allowed=allowed)
        scores.append(float(found is not None and found.equals(wanted)))
    return scores


def final_answer(text: str) -> Answer | None:
    """Find the final answer of a text; None: it has none."""
    for latex, plain in _LATEX:
        text = text.replace(latex, plain)
    text = _FRACTION.sub(r"\1\2/\3\4", _MIXED.sub(" ", text))
    boxed = _last_box(text)
    if boxed is not None:
        return _number(_NUMBER.search(_MARKER.split(boxed)[-1]))
    _, hashes, after = text.rpartition("####")
    if hashes:
        return _number(_NUMBER.search(after))
    *before, after = _MARKER.split(text)
    if before and (answer := _number(_NUMBER.search(after))):
        return answer
    numbers = list(_NUMBER.finditer(text))
    return _number(numbers[-1]) if numbers else None


def _last_box(text: str) -> str | None:
    r"""Give the text between the braces of the last \boxed{}; None: there is no such box, or its braces do not end."""
    _, box, after = text.rpartition("\\boxed{")
    depth = 1
    for place, character in enumerate(after):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0 and box:
            return after[:place]
    return None


def _number(match: re.Match[str] | None) -> Answer | None:
    """Give the number of a match; None: there is no match, or it is too long, or it divides by zero."""
    if match is None or len(match[0]) > _LONGEST:
        return None
    bottom = Fraction((match["bottom"] or "1").replace(",", ""))
    if bottom == 0:
        return None
    value = int(match["whole"] or 0) + Fraction(match["top"].replace(",", "")) / bottom
    is_negative = bool(match["sign"]) or bool(match["inner"])
    return Answer(-value if is_negative else value, match["percent"] is not None)
