"""One JSON object, read from a file of unknown origin."""

from __future__ import annotations

import json
from pathlib import Path

_MOST_BYTES = 1 << 26
"""Bytes of the largest file that is read. hfdist writes none of this size, but the file may be anything."""


def read_object(path: Path) -> dict[str, object]:
    """Read a JSON object; give an empty one if the file is missing, unreadable, too large, or holds something else."""
    try:
        # A pipe or a device in the file's place would not end.
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return {}
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
