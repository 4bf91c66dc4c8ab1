"""What a source reads of a row: a column of text, or the columns of an example for fine-tuning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from functools import cached_property

from hfdist.config.data import DataConfig, SourceConfig, SourceKind
from hfdist.config.override_text import in_shell
from hfdist.config.paths import expand_user
from hfdist.data.sources.asked_columns import AskedColumns
from hfdist.data.sources.base import BadRow, ContentError, check_text
from hfdist.data.sources.columns import TEXT, Column, Kind, kinds_of
from hfdist.data.sources.formats import RowColumns, write_example
from hfdist.data.sources.images import COLUMNS as IMAGE_COLUMNS
from hfdist.data.sources.images import ImageRules, WithImages
from hfdist.errors import nearest


@dataclass(frozen=True)
class RowReader(AskedColumns):
    """Reads the rows of one source."""

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
    def key(self) -> str:
        """Part of the identity of what is read: of plain text, its column."""
        text = self.text.paths[0] if len(self.text.paths) == 1 else list(self.text.paths)
        mapped = [{name: column.paths for name, column in self.mapped}] if self.mapped else []
        if self.gives_examples or not isinstance(text, str):
            return json.dumps([self.format.value, text, *mapped])
        return text

    def columns(self, present: Mapping[str, Kind], *, where: str) -> list[str]:
        """Give those of the columns that are read; ContentError where they fit no format that is allowed.

        `present` says of each column what its values are, for what the error proposes.
        """
        if not self.gives_examples:
            if not (places := self.text.places(present)):
                raise self.no_text(present, where)
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
        fitting = [form for form in self.forms if form.fits(held)]
        if not fitting or (missing is not None and self.columns_key != RowReader.columns_key):
            raise missing or self.no_format(present, where)
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
                return BadRow(self.no_text(kinds_of([row]), where, is_row=True))
            return check_text(text, where=where)
        # Files that hold rows of several formats have null where a row has no such column.
        values = {**row, **{name: column.value(row) for name, column in self._named}} if self._named else row
        present = {name: value for name, value in values.items() if value is not None}
        for form in self.forms:
            if form.fits(present):
                example = write_example(form, present, self.images, where)
                if not self.keeps_columns or isinstance(example, BadRow):
                    return example
                whole = f"{example}\n{self._other_columns(form, row)}"
                return WithImages.of(whole, example.files) if isinstance(example, WithImages) else whole
        # Columns count under the names that the row itself has, and not under those of the config.
        empty = [name for form in self.forms if form.fits(row) for name in form.needed if row[name] is None]
        if empty:
            return BadRow(ContentError(f"the row has no value in `{empty[0]}`", where=where, found="null"))
        return BadRow(self.no_format(kinds_of([present]), where, is_row=True))

    def _other_columns(self, form: RowColumns, row: Mapping[str, object]) -> str:
        """Write what the format does not read of a row, if JSON has it."""
        named, wanted = dict(self._named), (*form.needed, *form.optional)
        used = {place[0] for name in wanted for place in named.get(name, Column((name,))).places(row)}
        parts = {name: _as_json(value) for name, value in row.items() if name not in used and value is not None}
        written = (f"{json.dumps(name)}: {value}" for name, value in parts.items() if value is not None)
        return f"{{{', '.join(written)}}}"

    @cached_property
    def _named(self) -> tuple[tuple[str, Column], ...]:
        """The columns that the config names."""
        return self.mapped if self.text == TEXT else (("text", self.text), *self.mapped)


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
