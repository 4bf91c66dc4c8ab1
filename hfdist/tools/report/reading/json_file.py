"""A file with one JSON object, of any content, read whole if it is of a bearable size."""

from __future__ import annotations

import json
from pathlib import Path

_MOST_BYTES = 1 << 26


def read_object(path: Path) -> dict[str, object]:
    """Read the object; an empty one: the file is not there, cannot be read, or holds something else."""
    try:
        # A pipe or a device in its place would not end.
        content = json.loads(path.read_bytes()) if path.is_file() and path.stat().st_size <= _MOST_BYTES else None
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
