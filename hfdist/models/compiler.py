"""Whether torch.compile works here: asked of a small function, as a C compiler or a driver may be missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def why_not_compiled(function: Callable[..., Any], *arguments: Any) -> str | None:
    """Call a compiled function once.

    Returns:
        The first line of what went wrong; None: it works.
    """
    try:
        function(*arguments)
    except Exception as error:  # whatever the compiler, a C compiler or the driver raises
        return next(iter(str(error).strip().splitlines()), type(error).__name__)
    return None


def why_nothing_is_compiled(device: torch.device) -> str | None:
    """Compile a sum for a device; give why that fails."""
    function = torch.compile(lambda values: (values.sin() + 1).sum())
    return why_not_compiled(lambda: function(torch.zeros(8, device=device)))
