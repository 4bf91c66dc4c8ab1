"""What a source reads of a row: a column of text, or the columns of an example for fine-tuning.

An example is text, too: JSON of its canonical form (see `examples.py`). So digests, the held-out split, order, ledger
and caches treat it as they treat a document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from hfdist.config.data import RowFormat, SourceConfig
from hfdist.data.sources import examples
from hfdist.data.sources.base import BadRow, ContentError, check_size, check_text, missing_column

_SHOWN_COLUMNS = 40


class _Form(NamedTuple):
    """Columns of a format."""

    needed: tuple[str, ...]
    optional: tuple[str, ...]
    convert: Callable[[Mapping[str, Any]], dict[str, Any]]


_FORMS: Mapping[RowFormat, _Form] = {
    RowFormat.messages: _Form(("messages",), ("tools",), examples.from_messages),
    RowFormat.sharegpt: _Form(("conversations",), ("system", "tools"), examples.from_sharegpt),
    RowFormat.alpaca: _Form(("instruction", "output"), ("input", "system", "history"), examples.from_alpaca),
    RowFormat.prompt_completion: _Form(("prompt", "completion"), ("tools",), examples.from_prompt),
}
"""In the order in which `auto` tries them; plain text comes last."""


@dataclass(frozen=True)
class RowReader:
    """Reads the rows of one source.

    Args:
        text: the column of plain text.
        format: what rows hold.
        section: of the config, that names the source; for messages.
    """

    text: str
    format: RowFormat = RowFormat.text
    section: str = "data.sources.NAME"

    @classmethod
    def of(cls, source: SourceConfig, default: RowFormat, section: str) -> RowReader:
        """Of a source, where it names no format: of `data.format`."""
        return cls(source.text, source.format or default, section)

    @property
    def gives_examples(self) -> bool:
        """Whether rows become examples in canonical JSON, and not plain text."""
        return self.format is not RowFormat.text

    @property
    def key(self) -> str:
        """Part of the identity of what is read: of plain text, its column."""
        return json.dumps([self.format.value, self.text]) if self.gives_examples else self.text

    def columns(self, present: Sequence[str], *, where: str) -> list[str]:
        """Give those of the columns that are read.

        Raises:
            ContentError: they fit no format that is allowed.
        """
        if not self.gives_examples:
            if self.text not in present:
                raise missing_column(self.text, present, where=where, section=self.section)
            return [self.text]
        fitting = [form for form in self._forms if set(form.needed) <= set(present)]
        if not fitting:
            raise self._no_format(present, where)
        wanted = {name for form in fitting for name in (*form.needed, *form.optional)}
        return [name for name in present if name in wanted]

    def read(self, row: Mapping[str, Any], *, where: str) -> str | BadRow:
        """Give a row as text.

        Args:
            row: its columns, as JSON has them.
            where: the file and the row.
        """
        if not self.gives_examples:
            if self.text not in row:
                return BadRow(missing_column(self.text, list(row), where=where, section=self.section))
            return check_text(row[self.text], where=where)
        # Files that hold rows of several formats have null where a row has no such column.
        present = {name: value for name, value in row.items() if value is not None}
        for form in self._forms:
            if set(form.needed) <= set(present):
                return _canonical(form, present, where)
        return BadRow(self._no_format(list(present), where))

    @property
    def _forms(self) -> list[_Form]:
        if self.format is not RowFormat.auto:
            return [_FORMS[self.format]]
        return [*_FORMS.values(), _Form((self.text,), (), partial(examples.from_text, column=self.text))]

    def _no_format(self, present: Sequence[str], where: str) -> ContentError:
        allowed = " | ".join(" + ".join(form.needed) for form in self._forms)
        return ContentError(
            "the columns fit no format of examples" if self.format is RowFormat.auto else "columns are missing",
            where=where,
            found=", ".join(list(present)[:_SHOWN_COLUMNS]) or "no column with a value",
            allowed=allowed,
            hint=f"{self.section}.format=text {self.section}.text={next(iter(present), 'COLUMN')} reads plain text",
        )


def _canonical(form: _Form, row: Mapping[str, Any], where: str) -> str | BadRow:
    try:
        # The order of keys stays: templates write tools as they find them.
        text = json.dumps(form.convert(row), ensure_ascii=False)
    except ContentError as error:
        error.where = where
        return BadRow(error)
    # Values that JSON does not have, such as times; and too deep a nesting.
    except (TypeError, ValueError, RecursionError) as error:
        return BadRow(ContentError(f"the row cannot be read as an example: {error}", where=where))
    checked = check_text(text, where=where)
    return check_size(len(text), where=where) or checked
