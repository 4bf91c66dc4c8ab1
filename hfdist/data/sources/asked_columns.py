"""The columns that a config asks for in the rows of a source, and what messages propose where rows have others."""

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

_SHOWN_COLUMNS = 40
_NEEDED = {format: form.needed for format, form in FORMS_BY_NAME.items()} | {
    RowFormat.auto: FORMS[RowFormat.prompt_completion].needed,
    RowFormat.preference: ("prompt", "chosen", "rejected"),
}
"""Columns of each format, for hints: where names tell nothing, the columns of the rows are proposed in this order."""
_NUMBERS = ("id", "idx", "index")
"""Columns that count rows."""
_NO_TEXTS = (*_NUMBERS, "url", "source", "time", "timestamp", "date", "created", "label", "language", "lang", "uuid")
"""Columns that hold texts which are no documents."""
_TEXT_COLUMNS = ("content", "body", "raw_text", "raw_content", "document", "article", "passage", "story", "code")
"""Columns that hold the text in many datasets, the most likely first."""
_INDEX_OPTIONS = {
    RowFormat.text: "",
    RowFormat.preference: " --config-name=tune",
    RowFormat.unpaired_preference: " --config-name=tune task=kto",
    RowFormat.retrieval: " --config-name=tune task=embed",
    RowFormat.source_target: " --config-name=tune task=seq2seq",
}
"""What the command that indexes rows of a format has besides; of other formats their name."""
_TAKES_TEXT = "rows of text: hfdist tokenizes them itself; in Python, hfdist.Trainer takes rows of input_ids and labels"


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
    """Whether examples also hold the columns that their format does not read."""

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
        # Rewards alone read the other columns.
        return "hfdist index --config-name=tune task=grpo" if self.keeps_columns else _index_command(self.format)

    def no_text(self, present: Mapping[str, Kind], where: str, *, is_row: bool = False) -> ContentError:
        """Make the error of rows without the column of plain text; its hint names what would read them.

        `present` has the columns with the kinds of their values; `is_row` says that they are of one row, and not of a
        whole file.
        """
        # Where the column was named, or other rows of the file have it, it stays beside the one that is proposed.
        has_asked = is_row or self.text != TEXT
        column = self._likely_text(present)
        as_text = None if column is None else self.name_texts([column], has_asked=has_asked)
        instead = self._instead_of_text(present, as_text)
        return ContentError(
            f"there is no column {self.text}",
            where=where,
            allowed=", ".join(present),
            hint=instead or as_text,
            text_column=column if instead is None else None,
        )

    def _likely_text(self, present: Mapping[str, Kind]) -> str | None:
        """Guess which column holds the texts; None: there is no text."""
        texts = [column for column, kind in present.items() if kind is Kind.text]
        # A name of one letter says as little as a number.
        plausible = [column for column in texts if column not in _NO_TEXTS and len(column) > 1] or texts
        for column in _TEXT_COLUMNS:
            if column in plausible:
                return column
        return nearest(self.text.paths[0], plausible, cutoff=0.0)

    def _instead_of_text(self, present: Mapping[str, Kind], as_text: str | None) -> str | None:
        """Name the command for rows that are no plain text, and how to read them as text; None: they may be text."""
        if "input_ids" in present:
            return _TAKES_TEXT
        if FORMS_BY_NAME[RowFormat.preference].fits(present):
            learns, format = "hfdist dpo learns from preferences", RowFormat.preference
            as_text = f"{self.section}.text=chosen" if present["chosen"] is Kind.text else None
        elif any(form.fits(present) for form in FORMS.values()):
            learns, format = "hfdist finetune learns from conversations, with the same model and data", RowFormat.auto
        else:
            return None
        as_text = "" if as_text is None else f"; as text: {as_text}"
        return f"{learns}{as_text}; to index them: {_index_command(format)}"

    def name_texts(self, columns: Iterable[str], *, has_asked: bool) -> str:
        """Write the override that names the text columns of several files; `has_asked`: one has what was asked for."""
        asked = self.text.paths if has_asked else ()
        names = list(dict.fromkeys([*asked, *columns]))
        return in_shell(f"{self.section}.text", names if len(names) > 1 else names[0])

    def _propose(self, found: Mapping[str, str]) -> str:
        """Propose columns of the rows for those of the format; prompt and completion may be turns of a chat, too."""
        hint = f"{self._name_columns(found)} if these columns hold them"
        if self.format is RowFormat.auto and found.keys() == {"prompt", "completion"}:
            turns = {"instruction": found["prompt"], "output": found["completion"]}
            hint = f"{hint}; {self._name_columns(turns)} makes them turns of a chat"
        return hint

    def _name_columns(self, columns: Mapping[str, str]) -> str:
        return in_shell(self.columns_key, dict(columns))

    def no_format(self, present: Mapping[str, Kind], where: str, *, is_row: bool = False) -> ContentError:
        """Make the error of rows whose columns fit no format that is allowed; `no_text` explains the arguments."""
        return ContentError(
            "the columns fit no format of examples" if self.format is RowFormat.auto else "columns are missing",
            where=where,
            found=", ".join(list(present)[:_SHOWN_COLUMNS]) or "no column with a value",
            allowed=" | ".join(" + ".join(form.needed) for form in self.forms),
            hint=self._hint_of_format(present, is_row=is_row),
        )

    def _hint_of_format(self, present: Mapping[str, Kind], *, is_row: bool) -> str:
        """Propose what reads these columns: another command, their names in `data.columns`, or other rows."""
        missing = [name for name in _NEEDED[self.format] if name not in present]
        others = [column for column in present if column not in (*_NEEDED[self.format], *_NUMBERS)]
        unused = [column for column in others if present[column] in (Kind.text, Kind.turns)]
        if "input_ids" in present:
            return _TAKES_TEXT
        command = self._other_command(present)
        if command is not None:
            return command
        for form in self.forms:
            guessed = guess_columns(form.needed, form.optional, present)
            if guessed:
                return self._propose(guessed)
        if self.keeps_columns and "prompt" in present:
            named = f"'{self.columns_key}={{completion: COLUMN}}' names the answers"
            return f"{named}; data.format=prompt, where rewards need none"
        if self.format is RowFormat.preference and any(form.fits(present) for form in FORMS.values()):
            return "hfdist sft learns from such rows; dpo and reward compare a chosen answer with a rejected one"
        if "messages" in present and missing == ["prompt", "completion"] and len(unused) == 2:
            # The messages end with a question, and the other column has its answer.
            answer = next(column for column in unused if column != "messages")
            return self._propose({"prompt": "messages", "completion": answer})
        if "messages" in present and missing[:1] == ["prompt"]:
            # The question and the answer are a list of messages each.
            return 'rows such as {"prompt": messages[:-1], "completion": messages[-1:]}'
        return self._hint_of_unknown_names(present, missing, unused, is_row=is_row)

    def _other_command(self, present: Mapping[str, Kind]) -> str | None:
        """Name the command that learns from pairs of answers, or from liked ones, where this one does not."""
        has_pairs = set(_NEEDED[RowFormat.preference]) <= set(present)
        if self.format is RowFormat.auto and FORMS_BY_NAME[RowFormat.preference].fits(present):
            return "hfdist tune task=dpo learns from preferences, with the same model and data"
        if self.format is RowFormat.unpaired_preference and has_pairs:
            return "hfdist dpo learns from such rows, and hfdist reward; kto has one answer a row, and its label"
        if self.format is RowFormat.preference and set(_NEEDED[RowFormat.unpaired_preference]) <= set(present):
            return "hfdist kto learns from such rows; dpo and reward compare a chosen answer with a rejected one"
        return None

    def _hint_of_unknown_names(
        self, present: Mapping[str, Kind], missing: Sequence[str], unused: Sequence[str], *, is_row: bool
    ) -> str:
        """Propose the `unused` columns for the `missing` ones, in their order, or to read one of them as plain text."""
        column = next((name for name, kind in present.items() if kind is Kind.text), None)
        as_text = None
        if column is not None and self.format is RowFormat.auto:
            named = self.name_texts([column], has_asked=False)
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


def _index_command(format: RowFormat) -> str:
    return f"hfdist index{_INDEX_OPTIONS.get(format, f' data.format={format.value}')}"
