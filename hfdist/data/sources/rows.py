"""The reader of a source's rows: a row becomes its plain text, or an example for fine-tuning."""

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
    """The reader of the rows of one source, with the columns and the format that the config asks for."""

    images: ImageRules | None = None
    """Limits of the images of rows; None: columns of images are not read."""

    @classmethod
    def of(cls, source: SourceConfig, data: DataConfig, section: str) -> RowReader:
        """Make the reader of a source, which `section` of the config holds; `data` says what the source does not."""
        named = source.columns or data.columns
        mapped = {name: Column.of(paths) for name, paths in named.items()}
        text = mapped.pop("text", TEXT)
        if source.text != "text" and "text" not in source.columns:
            text = Column.of(source.text)
        rules = ImageRules(_folder_of(source), data.images.max_bytes, data.images.max_pixels)
        return cls(
            text=text,
            format=source.format or data.format,
            section=section,
            mapped=tuple(sorted(mapped.items())),
            columns_key=f"{section}.columns" if source.columns else cls.columns_key,
            keeps_columns=bool(data.keep_columns),
            images=None if data.images.used is False else rules,
        )

    @property
    def key(self) -> str:
        """What is read of each row, as a text for identities: the column of plain text alone, or all in JSON."""
        paths = list(self.text.paths)
        if not self.gives_examples and len(paths) == 1:
            return paths[0]
        asked: list[object] = [self.format.value, paths[0] if len(paths) == 1 else paths]
        if self.mapped:
            asked.append({name: column.paths for name, column in self.mapped})
        return json.dumps(asked)

    def columns(self, present: Mapping[str, Kind], *, where: str) -> list[str]:
        """Give the columns of a file that are read, in its order; ContentError: they fit no format that is allowed.

        `present` has the columns of the file with the kinds of their values, which the error's hint needs. `where`
        names the file.
        """
        if not self.gives_examples:
            paths = self.text.places(present)
            if not paths:
                raise self.error_without_text(present, where)
            return list(dict.fromkeys(column for column, *_ in paths))
        held, missing = self._find_columns(present, where)
        fitting = [form for form in self.forms if form.fits(held)]
        # What the source's own config names must be there; what `data.columns` names, in some of the sources only.
        if not fitting or (missing is not None and self.columns_key != RowReader.columns_key):
            raise missing or self.error_without_format(present, where)
        if self.keeps_columns:
            return list(present)
        names = {name for form in fitting for name in (*form.needed, *form.optional)}
        if self.images is None:
            names -= set(IMAGE_COLUMNS)
        wanted = {column for name in names for column in held.get(name, ())}
        return [name for name in present if name in wanted]

    def _find_columns(
        self, present: Mapping[str, Kind], where: str
    ) -> tuple[dict[str, list[str]], ContentError | None]:
        """Give the columns of a file that may hold each column of a format, and the error of the first missing one."""
        held = {name: [name] for name in present}
        missing: ContentError | None = None
        for name, column in self._named:
            held.pop(name, None)
            paths = column.places(present)
            if paths:
                held[name] = [found for found, *_ in paths]
            elif name != "text" and missing is None:
                what, allowed = f"there is no column {column} for {name}", ", ".join(present)
                near = nearest(column.paths[0], present, cutoff=0.0)
                hint = None if near is None else in_shell(f"{self.columns_key}.{name}", near)
                missing = ContentError(what, where=where, allowed=allowed, hint=hint)
        return held, missing

    def read(self, row: Mapping[str, object], *, where: str) -> str | BadRow:
        """Give the text or the example of a row, whose values are those of JSON; `where` names the file and the row."""
        if not self.gives_examples:
            text = self.text.value(row)
            if text is None and not self.text.places(row):
                return BadRow(self.error_without_text(kinds_of([row]), where, is_row=True))
            return check_text(text, where=where)
        # Files that hold rows of several formats have null where a row has no such column.
        values = dict(row)
        for name, column in self._named:
            values[name] = column.value(row)
        present = {name: value for name, value in values.items() if value is not None}
        for form in self.forms:
            if form.fits(present):
                example = write_example(form, present, self.images, where)
                return self._with_other_columns(example, form, row) if self.keeps_columns else example
        # Columns count under the names that the row itself has, and not under those of the config.
        empty = [name for form in self.forms if form.fits(row) for name in form.needed if row[name] is None]
        if empty:
            return BadRow(ContentError(f"the row has no value in `{empty[0]}`", where=where, found="null"))
        return BadRow(self.error_without_format(kinds_of([present]), where, is_row=True))

    def _with_other_columns(self, example: str | BadRow, form: RowColumns, row: Mapping[str, object]) -> str | BadRow:
        """Add a line of JSON with the columns of a row that its format does not read."""
        if isinstance(example, BadRow):
            return example
        whole = f"{example}\n{self._other_columns(form, row)}"
        return WithImages.of(whole, example.files) if isinstance(example, WithImages) else whole

    def _other_columns(self, form: RowColumns, row: Mapping[str, object]) -> str:
        """Write JSON of the columns of a row that a format does not read; values that JSON lacks are left out."""
        named = dict(self._named)
        used: set[str] = set()
        for name in (*form.needed, *form.optional):
            paths = named.get(name, Column((name,))).places(row)
            used.update(column for column, *_ in paths)
        written: list[str] = []
        for name, value in row.items():
            text = None if name in used or value is None else _as_json(value)
            if text is not None:
                written.append(f"{json.dumps(name)}: {text}")
        return f"{{{', '.join(written)}}}"

    @cached_property
    def _named(self) -> tuple[tuple[str, Column], ...]:
        """Columns of formats that the config names, each with the column of the rows that holds it."""
        return self.mapped if self.text == TEXT else (("text", self.text), *self.mapped)


def _folder_of(source: SourceConfig) -> str | None:
    """Give the folder below which rows may name files of images; None: the source is on no disk of this machine."""
    if source.path is None or "://" in source.path or source.kind not in (SourceKind.files, SourceKind.hub):
        return None
    # The path may be a glob: the folder is the last part before its wildcards that is there.
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
    """Write a value as JSON; None: JSON lacks it."""
    try:
        return json.dumps(value, default=_as_text)
    except (TypeError, ValueError, RecursionError):
        return None


def _as_text(value: object) -> str:
    """Write a date, a time or a decimal number as text, without a loss; TypeError: another type that JSON lacks."""
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(type(value).__name__)
