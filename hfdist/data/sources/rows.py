"""What a source reads of a row: a column of text, or the columns of an example for fine-tuning."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from functools import cached_property

from hfdist.config.data import DataConfig, RowFormat, SourceConfig, SourceKind
from hfdist.config.override_text import in_shell
from hfdist.config.paths import expand_user
from hfdist.data.sources.base import BadRow, ContentError, check_text
from hfdist.data.sources.columns import TEXT, Column, Kind, guess_columns, kinds_of
from hfdist.data.sources.formats import FORMS, FORMS_BY_NAME, OTHER_NAMES, RowColumns, from_text, write_example
from hfdist.data.sources.images import COLUMNS as IMAGE_COLUMNS
from hfdist.data.sources.images import ImageRules, WithImages
from hfdist.errors import nearest

_SHOWN_COLUMNS = 40
_NAMED = {format: form.needed for format, form in FORMS_BY_NAME.items()} | {
    RowFormat.auto: FORMS[RowFormat.prompt_completion].needed,
    RowFormat.preference: ("prompt", "chosen", "rejected"),
}
"""What the hint says of columns whose names tell nothing, in their order."""
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
class RowReader:
    """Reads the rows of one source: `text` is the column of plain text, `section` of the config is for messages."""

    text: Column = TEXT
    format: RowFormat = RowFormat.text
    section: str = "data.sources.NAME"
    mapped: tuple[tuple[str, Column], ...] = ()
    """Columns of formats that have another name in the rows."""
    columns_key: str = "data.columns"
    """Where the config says so."""
    keeps_columns: bool = False
    """Whether examples hold what their format does not read, too."""
    images: ImageRules | None = None
    """What images of rows may be; None: their columns are not read."""

    @classmethod
    def of(cls, source: SourceConfig, data: DataConfig, section: str) -> RowReader:
        """Make the reader of a source; what it does not say, `data.format` and `data.columns` do."""
        mapped = {name: Column.of(paths) for name, paths in (source.columns or data.columns).items()}
        text = mapped.pop("text", TEXT)
        if source.text != "text" and "text" not in source.columns:
            text = Column.of(source.text)
        key = f"{section}.columns" if source.columns else cls.columns_key
        others = (source.format or data.format, section, tuple(sorted(mapped.items())), key)
        rules = ImageRules(_folder_of(source), data.images.max_bytes, data.images.max_pixels)
        images = None if data.images.used is False else rules
        return cls(text, *others, keeps_columns=bool(data.keep_columns), images=images)

    @property
    def gives_examples(self) -> bool:
        """Whether rows become examples in canonical JSON, and not plain text."""
        return self.format is not RowFormat.text

    @property
    def key(self) -> str:
        """Part of the identity of what is read: of plain text, its column."""
        text = self.text.paths[0] if len(self.text.paths) == 1 else list(self.text.paths)
        mapped = [{name: column.paths for name, column in self.mapped}] if self.mapped else []
        if self.gives_examples or not isinstance(text, str):
            return json.dumps([self.format.value, text, *mapped])
        return text

    @property
    def index_command(self) -> str:
        """The command that indexes what is read so; it composes a pretraining, which takes no rows of other tasks."""
        # Rewards alone read the other columns.
        return "hfdist index --config-name=tune task=grpo" if self.keeps_columns else _index_command(self.format)

    def columns(self, present: Mapping[str, Kind], *, where: str) -> list[str]:
        """Give those of the columns that are read; ContentError where they fit no format that is allowed.

        `present` says of each column what its values are, for what the error proposes.
        """
        if not self.gives_examples:
            if not (places := self.text.places(present)):
                raise self._no_text(present, where)
            return list(dict.fromkeys(place[0] for place in places))
        held = {name: [name] for name in present}
        missing: ContentError | None = None
        for name, column in self._named:
            held.pop(name, None)
            if places := column.places(present):
                held[name] = [place[0] for place in places]
            elif name != "text":
                what, allowed = f"there is no column {column} for {name}", ", ".join(present)
                near = nearest(column.paths[0], present, cutoff=0.0)
                hint = None if near is None else in_shell(f"{self.columns_key}.{name}", near)
                missing = missing or ContentError(what, where=where, allowed=allowed, hint=hint)
        fitting = [form for form in self._forms if set(form.needed) <= held.keys()]
        if not fitting or (missing is not None and self.columns_key != RowReader.columns_key):
            raise missing or self._no_format(present, where)
        if self.keeps_columns:
            return list(present)
        names = {name for form in fitting for name in (*form.needed, *form.optional)}
        names -= set(IMAGE_COLUMNS) if self.images is None else set()
        wanted = {one for name in names for one in held.get(name, ())}
        return [name for name in present if name in wanted]

    def read(self, row: Mapping[str, object], *, where: str) -> str | BadRow:
        """Give a row, with its columns as JSON has them, as text; `where` names the file and the row."""
        if not self.gives_examples:
            text = self.text.value(row)
            if text is None and not self.text.places(row):
                return BadRow(self._no_text(kinds_of([row]), where, is_row=True))
            return check_text(text, where=where)
        # Files that hold rows of several formats have null where a row has no such column.
        values = {**row, **{name: column.value(row) for name, column in self._named}} if self._named else row
        present = {name: value for name, value in values.items() if value is not None}
        for form in self._forms:
            if set(form.needed) <= set(present):
                example = write_example(form, present, self.images, where)
                if not self.keeps_columns or isinstance(example, BadRow):
                    return example
                whole = f"{example}\n{self._others(form, row)}"
                return WithImages.of(whole, example.files) if isinstance(example, WithImages) else whole
        # Only what the row itself has, and not a name of the config.
        empty = [
            name for form in self._forms if set(form.needed) <= set(row) for name in form.needed if row[name] is None
        ]
        if empty:
            return BadRow(ContentError(f"the row has no value in `{empty[0]}`", where=where, found="null"))
        return BadRow(self._no_format(kinds_of([present]), where, is_row=True))

    def _others(self, form: RowColumns, row: Mapping[str, object]) -> str:
        """Write what the format does not read of a row, if JSON has it."""
        named, wanted = dict(self._named), (*form.needed, *form.optional)
        used = {place[0] for name in wanted for place in named.get(name, Column((name,))).places(row)}
        parts = {name: _as_json(value) for name, value in row.items() if name not in used and value is not None}
        written = (f"{json.dumps(name)}: {value}" for name, value in parts.items() if value is not None)
        return f"{{{', '.join(written)}}}"

    # Read for each row.
    @cached_property
    def _forms(self) -> list[RowColumns]:
        if self.format is not RowFormat.auto:
            return [FORMS_BY_NAME[self.format], *OTHER_NAMES.get(self.format, ())]
        forms = [*FORMS.values(), RowColumns(("text",), (), from_text)]
        names = {name for name, _ in self.mapped}
        # Who names a column means a format that has it.
        return sorted(forms, key=lambda form: names.isdisjoint((*form.needed, *form.optional)))

    @cached_property
    def _named(self) -> tuple[tuple[str, Column], ...]:
        """The columns that the config names."""
        return self.mapped if self.text == TEXT else (("text", self.text), *self.mapped)

    def _no_text(self, present: Mapping[str, Kind], where: str, *, is_row: bool = False) -> ContentError:
        # Where the column was named, or other rows of the file have it, it stays beside the one that is proposed.
        is_one = is_row or self.text != TEXT
        texts = [column for column, kind in present.items() if kind is Kind.text]
        free = [column for column in texts if column not in _NO_TEXTS and len(column) > 1] or texts
        likely = [column for column in _TEXT_COLUMNS if column in free]
        column = nearest(self.text.paths[0], likely[:1] or free, cutoff=0.0)
        hint = None if column is None else self.name_texts([column], has_asked=is_one)
        if "input_ids" in present:
            column, hint = None, _TAKES_TEXT
        elif set(FORMS_BY_NAME[RowFormat.preference].needed) <= set(present):
            as_text = f"; as text: {self.section}.text=chosen" if present["chosen"] is Kind.text else ""
            column, hint = (
                None,
                f"hfdist dpo learns from preferences{as_text}; to index them: {_index_command(RowFormat.preference)}",
            )
        elif any(set(form.needed) <= set(present) for form in FORMS.values()):
            as_text = "" if hint is None else f"; as text: {hint}"
            finetune = f"hfdist finetune learns from conversations, with the same model and data{as_text}"
            column, hint = None, f"{finetune}; to index them: {_index_command(RowFormat.auto)}"
        what, allowed = f"there is no column {self.text}", ", ".join(present)
        return ContentError(what, where=where, allowed=allowed, hint=hint, text_column=column)

    def name_texts(self, columns: Iterable[str], *, has_asked: bool) -> str:
        """Write the override that names the text columns of several files; `has_asked`: one has what is asked for."""
        names = [*dict.fromkeys([*(self.text.paths if has_asked else ()), *columns])]
        return in_shell(f"{self.section}.text", names if len(names) > 1 else names[0])

    def _mapping(self, found: Mapping[str, str]) -> str:
        """Propose columns; pairs that may be of a chat are proposed as turns, too."""
        hint = f"{self._name_columns(found)} if these columns hold them"
        if self.format is RowFormat.auto and found.keys() == {"prompt", "completion"}:
            turns = {"instruction": found["prompt"], "output": found["completion"]}
            hint = f"{hint}; {self._name_columns(turns)} makes them turns of a chat"
        return hint

    def _name_columns(self, columns: Mapping[str, str]) -> str:
        return in_shell(self.columns_key, dict(columns))

    def _no_format(self, present: Mapping[str, Kind], where: str, *, is_row: bool = False) -> ContentError:
        return ContentError(
            "the columns fit no format of examples" if self.format is RowFormat.auto else "columns are missing",
            where=where,
            found=", ".join(list(present)[:_SHOWN_COLUMNS]) or "no column with a value",
            allowed=" | ".join(" + ".join(form.needed) for form in self._forms),
            hint=self._hint_of_format(present, is_row=is_row),
        )

    def _hint_of_format(self, present: Mapping[str, Kind], *, is_row: bool) -> str:
        """Propose what reads these columns: another command, their names in `data.columns`, or other rows."""
        missing = [name for name in _NAMED[self.format] if name not in present]
        others = [column for column in present if column not in (*_NAMED[self.format], *_NUMBERS)]
        free = [column for column in others if present[column] in (Kind.text, Kind.turns)]
        if "input_ids" in present:
            return _TAKES_TEXT
        if (command := self._other_command(present)) is not None:
            return command
        for form in self._forms:
            if found := guess_columns(form.needed, form.optional, present):
                return self._mapping(found)
        if self.keeps_columns and "prompt" in present:
            named = f"'{self.columns_key}={{completion: COLUMN}}' names the answers"
            return f"{named}; data.format=prompt, where rewards need none"
        if self.format is RowFormat.preference and any(set(form.needed) <= set(present) for form in FORMS.values()):
            return "hfdist sft learns from such rows; dpo and reward compare a chosen answer with a rejected one"
        if "messages" in present and missing == ["prompt", "completion"] and len(free) == 2:
            # Messages that end with a question, and its answer.
            return self._mapping({"prompt": "messages", "completion": next(one for one in free if one != "messages")})
        if "messages" in present and missing[:1] == ["prompt"]:
            # What is asked, and the answer that is compared: a list of messages each.
            return 'rows such as {"prompt": messages[:-1], "completion": messages[-1:]}'
        return self._hint_of_names(present, missing, free, is_row=is_row)

    def _other_command(self, present: Mapping[str, Kind]) -> str | None:
        """Name the command that learns from pairs of answers, or from liked ones, where this one does not."""
        has_pairs = set(_NAMED[RowFormat.preference]) <= set(present)
        if self.format is RowFormat.auto and set(FORMS_BY_NAME[RowFormat.preference].needed) <= set(present):
            return "hfdist tune task=dpo learns from preferences, with the same model and data"
        if self.format is RowFormat.unpaired_preference and has_pairs:
            return "hfdist dpo learns from such rows, and hfdist reward; kto has one answer a row, and its label"
        if self.format is RowFormat.preference and set(_NAMED[RowFormat.unpaired_preference]) <= set(present):
            return "hfdist kto learns from such rows; dpo and reward compare a chosen answer with a rejected one"
        return None

    def _hint_of_names(
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
            hint = self._mapping(dict(zip(missing, free, strict=False)))
            return hint if as_text is None else f"{hint}; {as_text}"
        rows = f"rows with {' and '.join(missing)}" + (", which is true or false" if "label" in missing else "")
        return rows if as_text is None else as_text


def _folder_of(source: SourceConfig) -> str | None:
    """Give the folder in which the rows of a source may name images; None: it is on no disk of this machine."""
    if source.path is None or "://" in source.path or source.kind not in (SourceKind.files, SourceKind.hub):
        return None
    path = expand_user(source.path)
    while not path.exists() or any(letter in path.name for letter in "*?["):
        if path == path.parent:
            return None
        path = path.parent
    # A Hub id is no path, and may be a part of one that there is.
    if source.kind is SourceKind.hub and path != expand_user(source.path):
        return None
    return str(path if path.is_dir() else path.parent)


def index_folder(section: str) -> str:
    """Give the path of a source's index below `<run.dir>/index`: its name, or `eval_sources/` and its name."""
    return section.removeprefix("data.").removeprefix("sources.").replace(".", "/", 1)


def _index_command(format: RowFormat) -> str:
    return f"hfdist index{_INDEX_OPTIONS.get(format, f' data.format={format.value}')}"


def _as_json(value: object) -> str | None:
    try:
        return json.dumps(value, default=_as_text)
    except (TypeError, ValueError, RecursionError):
        return None


def _as_text(value: object) -> str:
    """Write what JSON lacks, and text has exactly; a TypeError: bytes and the like."""
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(type(value).__name__)
