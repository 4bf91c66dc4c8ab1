"""The columns that a config asks for in the rows of a source, and the errors where the rows have other columns.

An error has one hint, the most certain thing that the user can do with the columns that are there:

plain text     a command that learns from such rows, or else the column that probably holds the text
examples       a command that learns from such rows; or else the columns that probably have the format's under other
               names; or else other rows
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hfdist.config.data import RowFormat
from hfdist.config.override_text import in_shell
from hfdist.data.sources.base import ContentError
from hfdist.data.sources.columns import TEXT, Column, Kind, guess_columns
from hfdist.data.sources.formats import FORMS, FORMS_BY_NAME, OTHER_NAMES, RowColumns, from_text
from hfdist.errors import nearest

_MOST_SHOWN = 40
"""Number of columns that a message names at the most."""
_NEEDED = {name: form.needed for name, form in FORMS_BY_NAME.items()} | {
    RowFormat.auto: FORMS[RowFormat.prompt_completion].needed,
    RowFormat.preference: ("prompt", "chosen", "rejected"),
}
"""Columns of each format, for hints: where names tell nothing, the columns of the rows are proposed in this order."""
_ROW_NUMBERS = ("id", "idx", "index")
"""Names of columns that count rows."""
_OTHER_TEXTS = (
    *_ROW_NUMBERS,
    "url",
    "source",
    "time",
    "timestamp",
    "date",
    "created",
    "label",
    "language",
    "lang",
    "uuid",
)
"""Names of columns whose texts are no documents."""
_LIKELY_TEXTS = ("content", "body", "raw_text", "raw_content", "document", "article", "passage", "story", "code")
"""Names that the column of text has in many datasets, the most likely first."""
_INDEX_OPTIONS = {
    RowFormat.text: "",
    RowFormat.preference: " --config-name=tune",
    RowFormat.unpaired_preference: " --config-name=tune task=kto",
    RowFormat.retrieval: " --config-name=tune task=embed",
    RowFormat.source_target: " --config-name=tune task=seq2seq",
}
"""Options of `hfdist index` for rows of a format; for a format that is not here, it is `data.format`."""
_NO_TOKENS = "rows of text: hfdist tokenizes them itself; in Python, hfdist.Trainer takes rows of input_ids and labels"


@dataclass(frozen=True)
class AskedColumns:
    """What the config says of the columns of one source: `data.sources.NAME`, or else `data`."""

    text: Column = TEXT
    """The column of plain text."""
    format: RowFormat = RowFormat.text
    section: str = "data.sources.NAME"
    """Key of the source in the config, for messages."""
    mapped: tuple[tuple[str, Column], ...] = ()
    """Names of columns in a format, each with the column of the rows that holds it under another name."""
    columns_key: str = "data.columns"
    """Key of the config that gave `mapped`."""
    keeps_columns: bool = False
    """Whether examples also hold the columns that their format does not read: rewards do read them."""

    @property
    def gives_examples(self) -> bool:
        """Whether rows become examples in canonical JSON, and not plain text."""
        return self.format is not RowFormat.text

    # It is cached, since each row asks for it.
    @cached_property
    def forms(self) -> list[RowColumns]:
        """The formats that a row may have, in the order in which they are tried."""
        if self.format is not RowFormat.auto:
            return [FORMS_BY_NAME[self.format], *OTHER_NAMES.get(self.format, ())]
        forms = [*FORMS.values(), RowColumns(("text",), (), from_text)]
        names = {name for name, _ in self.mapped}
        # A column that the config names tells which format is meant: formats that have it come first.
        return sorted(forms, key=lambda form: names.isdisjoint((*form.needed, *form.optional)))

    @property
    def index_command(self) -> str:
        """The command that indexes these rows; it needs the task, since a pretraining takes no rows of other tasks."""
        return "hfdist index --config-name=tune task=grpo" if self.keeps_columns else _index_command(self.format)

    def error_without_text(self, present: Mapping[str, Kind], where: str, *, is_row: bool = False) -> ContentError:
        """Make the error of rows without the column of plain text; its hint names what would read them.

        `present` has the columns with the kinds of their values; `is_row` says that they are of one row, and not of a
        whole file.
        """
        # Where the column was named, or other rows of the file have it, it stays beside the one that is proposed.
        has_asked = is_row or self.text != TEXT
        column = self._guess_text(present)
        as_text = None if column is None else self.name_texts([column], has_asked=has_asked)
        instead = self._hint_for_examples(present, as_text)
        return ContentError(
            f"there is no column {self.text}",
            where=where,
            allowed=", ".join(present),
            hint=instead or as_text,
            text_column=column if instead is None else None,
        )

    def _guess_text(self, present: Mapping[str, Kind]) -> str | None:
        """Guess which column holds the documents; None: no column holds texts."""
        texts = [column for column, kind in present.items() if kind is Kind.text]
        # A name of one letter says as little as a number.
        plausible = [column for column in texts if column not in _OTHER_TEXTS and len(column) > 1]
        if not plausible:
            plausible = texts
        for column in _LIKELY_TEXTS:
            if column in plausible:
                return column
        return nearest(self.text.paths[0], plausible, cutoff=0.0)

    def _hint_for_examples(self, present: Mapping[str, Kind], as_text: str | None) -> str | None:
        """Name the command for rows that are examples, and how to read them as text; None: they are no examples.

        `as_text` is the override that reads the column which probably holds the text.
        """
        if "input_ids" in present:
            return _NO_TOKENS
        if FORMS_BY_NAME[RowFormat.preference].fits(present):
            learns = "hfdist dpo learns from preferences"
            index = _index_command(RowFormat.preference)
            as_text = f"{self.section}.text=chosen" if present["chosen"] is Kind.text else None
        elif any(form.fits(present) for form in FORMS.values()):
            learns = "hfdist finetune learns from conversations, with the same model and data"
            index = _index_command(RowFormat.auto)
        else:
            return None
        parts = [learns]
        if as_text is not None:
            parts.append(f"as text: {as_text}")
        parts.append(f"to index them: {index}")
        return "; ".join(parts)

    def name_texts(self, columns: Iterable[str], *, has_asked: bool) -> str:
        """Write the override that names the text columns of several files; a name that is there twice counts once.

        `has_asked` says that some file has the column which was asked for, so that it stays among the names.
        """
        asked = self.text.paths if has_asked else ()
        names = list(dict.fromkeys([*asked, *columns]))
        return in_shell(f"{self.section}.text", names if len(names) > 1 else names[0])

    def error_without_format(self, present: Mapping[str, Kind], where: str, *, is_row: bool = False) -> ContentError:
        """Make the error of rows whose columns fit no format that is allowed.

        `present` has the columns with the kinds of their values; `is_row` says that they are of one row, and not of a
        whole file.
        """
        return ContentError(
            "the columns fit no format of examples" if self.format is RowFormat.auto else "columns are missing",
            where=where,
            found=", ".join(list(present)[:_MOST_SHOWN]) or "no column with a value",
            allowed=" | ".join(" + ".join(form.needed) for form in self.forms),
            hint=self._hint_for_columns(present, is_row=is_row),
        )

    def _hint_for_columns(self, present: Mapping[str, Kind], *, is_row: bool) -> str:
        """Propose what reads these columns: the first hint that fits, from the most certain to a mere guess."""
        needed = _NEEDED[self.format]
        missing = [name for name in needed if name not in present]
        known = (*needed, *_ROW_NUMBERS)
        unused = [name for name, kind in present.items() if name not in known and kind in (Kind.text, Kind.turns)]
        return (
            (_NO_TOKENS if "input_ids" in present else None)
            or self._hint_of_other_objective(present)
            or self._hint_of_likely_names(present)
            or self._hint_for_rewards(present)
            or self._hint_of_supervised(present)
            or self._hint_for_messages(present, missing, unused)
            or self._hint_of_unknown_names(present, missing, unused, is_row=is_row)
        )

    def _hint_of_other_objective(self, present: Mapping[str, Kind]) -> str | None:
        """Name the command that learns from pairs of answers, or from liked ones, where this one does not."""
        has_pairs = set(_NEEDED[RowFormat.preference]) <= set(present)
        if self.format is RowFormat.auto and FORMS_BY_NAME[RowFormat.preference].fits(present):
            return "hfdist tune task=dpo learns from preferences, with the same model and data"
        if self.format is RowFormat.unpaired_preference and has_pairs:
            return "hfdist dpo learns from such rows, and hfdist reward; kto has one answer a row, and its label"
        if self.format is RowFormat.preference and set(_NEEDED[RowFormat.unpaired_preference]) <= set(present):
            return "hfdist kto learns from such rows; dpo and reward compare a chosen answer with a rejected one"
        return None

    def _hint_of_likely_names(self, present: Mapping[str, Kind]) -> str | None:
        """Propose columns whose names are known from published datasets; None: a format lacks one under any name."""
        for form in self.forms:
            guessed = guess_columns(form.needed, form.optional, present)
            if guessed:
                return self._propose(guessed)
        return None

    def _hint_for_rewards(self, present: Mapping[str, Kind]) -> str | None:
        """Say how rewards get the answers of rows that have a prompt; None: no reward reads these rows."""
        if not self.keeps_columns or "prompt" not in present:
            return None
        named = f"'{self.columns_key}={{completion: COLUMN}}' names the answers"
        return f"{named}; data.format=prompt, where rewards need none"

    def _hint_of_supervised(self, present: Mapping[str, Kind]) -> str | None:
        """Name the command for rows with one answer each, where pairs of answers are asked for."""
        if self.format is RowFormat.preference and any(form.fits(present) for form in FORMS.values()):
            return "hfdist sft learns from such rows; dpo and reward compare a chosen answer with a rejected one"
        return None

    def _hint_for_messages(
        self, present: Mapping[str, Kind], missing: Sequence[str], unused: Sequence[str]
    ) -> str | None:
        """Say how a prompt and its answer are made of `messages`; None: there are none, or nothing is to be made."""
        if "messages" not in present:
            return None
        if missing == ["prompt", "completion"] and "messages" in unused and len(unused) == 2:
            # The messages end with a question, and the other column has its answer.
            (answer,) = set(unused) - {"messages"}
            return self._propose({"prompt": "messages", "completion": answer})
        if missing[:1] == ["prompt"]:
            # The question and the answer are a list of messages each.
            return 'rows such as {"prompt": messages[:-1], "completion": messages[-1:]}'
        return None

    def _hint_of_unknown_names(
        self, present: Mapping[str, Kind], missing: Sequence[str], unused: Sequence[str], *, is_row: bool
    ) -> str:
        """Propose the `unused` columns for the `missing` ones, in their order, or to read one of them as plain text."""
        text_column = next((name for name, kind in present.items() if kind is Kind.text), None)
        as_text = None
        if text_column is not None and self.format is RowFormat.auto:
            named = self.name_texts([text_column], has_asked=False)
            as_text = f"{self.section}.format=text {named} reads it, where it is plain text"
        # One row shows only the columns that have a value in it, so that their order says little.
        has_enough = len(unused) >= len(missing) > 0
        if has_enough and "label" not in missing and not is_row:
            hint = self._propose(dict(zip(missing, unused, strict=False)))
            return hint if as_text is None else f"{hint}; {as_text}"
        if as_text is not None:
            return as_text
        rows = f"rows with {' and '.join(missing)}"
        return f"{rows}, which is true or false" if "label" in missing else rows

    def _propose(self, found: Mapping[str, str]) -> str:
        """Propose a column of the rows for each column of the format that `found` has as a key."""
        hint = f"{self._name_columns(found)} if these columns hold them"
        if self.format is RowFormat.auto and found.keys() == {"prompt", "completion"}:
            # A chat template writes turns; it leaves a prompt and its completion as they are.
            turns = {"instruction": found["prompt"], "output": found["completion"]}
            hint = f"{hint}; {self._name_columns(turns)} makes them turns of a chat"
        return hint

    def _name_columns(self, columns: Mapping[str, str]) -> str:
        """Write the override that gives columns of a format the rows' columns."""
        return in_shell(self.columns_key, dict(columns))


def _index_command(row_format: RowFormat) -> str:
    """Write the command that indexes rows of a format."""
    return f"hfdist index{_INDEX_OPTIONS.get(row_format, f' data.format={row_format.value}')}"
