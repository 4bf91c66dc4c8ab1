"""The columns that a config asks for in the rows of a source, and what is proposed where the rows have others."""

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
"""The columns that a hint names where those of the rows tell nothing by their names, in their order."""
_NUMBERS = ("id", "idx", "index")
_NO_TEXTS = (*_NUMBERS, "url", "source", "time", "timestamp", "date", "created", "label", "language", "lang", "uuid")
_TEXT_COLUMNS = ("content", "body", "raw_text", "raw_content", "document", "article", "passage", "story", "code")
"""Columns that hold the text in many datasets."""
_INDEX_OPTIONS = {
    RowFormat.text: "",
    RowFormat.preference: " --config-name=tune",
    RowFormat.unpaired_preference: " --config-name=tune task=kto",
    RowFormat.retrieval: " --config-name=tune task=embed",
    RowFormat.source_target: " --config-name=tune task=seq2seq",
}
_TAKES_TEXT = "rows of text: hfdist tokenizes them itself; in Python, hfdist.Trainer takes rows of input_ids and labels"


@dataclass(frozen=True)
class AskedColumns:
    """What `data.sources.NAME` says of the columns of its rows."""

    text: Column = TEXT
    """The column of plain text."""
    format: RowFormat = RowFormat.text
    section: str = "data.sources.NAME"
    """Key of the source in the config, for messages."""
    mapped: tuple[tuple[str, Column], ...] = ()
    """Columns of formats that have another name in the rows."""
    columns_key: str = "data.columns"
    """Key of the config that maps them."""
    keeps_columns: bool = False
    """Whether examples hold what their format does not read, too."""

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
        # Who names a column means a format that has it.
        return sorted(forms, key=lambda form: names.isdisjoint((*form.needed, *form.optional)))

    @property
    def index_command(self) -> str:
        """The command that indexes what is read so; it composes a pretraining, which takes no rows of other tasks."""
        # Rewards alone read the other columns.
        return "hfdist index --config-name=tune task=grpo" if self.keeps_columns else _index_command(self.format)

    def no_text(self, present: Mapping[str, Kind], where: str, *, is_row: bool = False) -> ContentError:
        """Make the error of rows without the column of plain text, with what would read them.

        `present` says what the values of each column are; `is_row`: of one row, and not of a whole file.
        """
        # Where the column was named, or other rows of the file have it, it stays beside the one that is proposed.
        has_asked, column = is_row or self.text != TEXT, self._likely_text(present)
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
        free = [column for column in texts if column not in _NO_TEXTS and len(column) > 1] or texts
        likely = [column for column in _TEXT_COLUMNS if column in free]
        return nearest(self.text.paths[0], likely[:1] or free, cutoff=0.0)

    def _instead_of_text(self, present: Mapping[str, Kind], as_text: str | None) -> str | None:
        """Say what takes rows that are no plain text, and how they could be read as such; None: they may be text."""
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
        """Write the override that names the text columns of several files; `has_asked`: one has what is asked for."""
        names = [*dict.fromkeys([*(self.text.paths if has_asked else ()), *columns])]
        return in_shell(f"{self.section}.text", names if len(names) > 1 else names[0])

    def _propose(self, found: Mapping[str, str]) -> str:
        """Propose columns; pairs that may be of a chat are proposed as turns, too."""
        hint = f"{self._name_columns(found)} if these columns hold them"
        if self.format is RowFormat.auto and found.keys() == {"prompt", "completion"}:
            turns = {"instruction": found["prompt"], "output": found["completion"]}
            hint = f"{hint}; {self._name_columns(turns)} makes them turns of a chat"
        return hint

    def _name_columns(self, columns: Mapping[str, str]) -> str:
        return in_shell(self.columns_key, dict(columns))

    def no_format(self, present: Mapping[str, Kind], where: str, *, is_row: bool = False) -> ContentError:
        """Make the error of rows whose columns fit no format that is allowed; the arguments are as of `no_text`."""
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
        free = [column for column in others if present[column] in (Kind.text, Kind.turns)]
        if "input_ids" in present:
            return _TAKES_TEXT
        if (command := self._other_command(present)) is not None:
            return command
        for form in self.forms:
            if found := guess_columns(form.needed, form.optional, present):
                return self._propose(found)
        if self.keeps_columns and "prompt" in present:
            named = f"'{self.columns_key}={{completion: COLUMN}}' names the answers"
            return f"{named}; data.format=prompt, where rewards need none"
        if self.format is RowFormat.preference and any(form.fits(present) for form in FORMS.values()):
            return "hfdist sft learns from such rows; dpo and reward compare a chosen answer with a rejected one"
        if "messages" in present and missing == ["prompt", "completion"] and len(free) == 2:
            # The messages end with a question, and the other column has its answer.
            return self._propose({"prompt": "messages", "completion": next(one for one in free if one != "messages")})
        if "messages" in present and missing[:1] == ["prompt"]:
            # The question and the answer are a list of messages each.
            return 'rows such as {"prompt": messages[:-1], "completion": messages[-1:]}'
        return self._hint_of_unknown_names(present, missing, free, is_row=is_row)

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
        self, present: Mapping[str, Kind], missing: Sequence[str], free: Sequence[str], *, is_row: bool
    ) -> str:
        """Propose the `free` columns for the `missing` ones, in their order, or to read one of them as plain text."""
        column = next((name for name, kind in present.items() if kind is Kind.text), None)
        as_text = None
        if column is not None and self.format is RowFormat.auto:
            named = self.name_texts([column], has_asked=False)
            as_text = f"{self.section}.format=text {named} reads it, where it is plain text"
        # A row is without the columns that have no value in it, so that its names say little.
        if len(free) >= len(missing) > 0 and "label" not in missing and not is_row:
            hint = self._propose(dict(zip(missing, free, strict=False)))
            return hint if as_text is None else f"{hint}; {as_text}"
        rows = f"rows with {' and '.join(missing)}" + (", which is true or false" if "label" in missing else "")
        return rows if as_text is None else as_text


def _index_command(format: RowFormat) -> str:
    return f"hfdist index{_INDEX_OPTIONS.get(format, f' data.format={format.value}')}"
