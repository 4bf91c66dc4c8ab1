"""Which key is probably meant by a name that no key has."""

from __future__ import annotations

from hfdist.config.plain_values import accepts_text
from hfdist.config.schema import ANY_NAME, all_keys, find_key, members
from hfdist.errors import nearest

_MOST_LIKELY = 3
"""Most keys that are named."""
_MOST_LETTERS = 2
"""Most letters by which a slip of the pen makes a word longer or shorter."""


def nearest_key(name: str) -> str | None:
    """Give the key that was probably meant; None: no key is like it."""
    return next(iter(likely_keys(name)), None)


def likely_keys(name: str, value: str | None = None) -> list[str]:
    """Give the keys that may be meant: the same last part elsewhere, longer names in the section, or a slip of the pen.

    Of a section's keys that say more, such as `warmup_steps` and `warmup_fraction`, those that accept `value`.
    """
    respelt = _respell(name)
    if respelt is not None:
        return [respelt]
    names = [key.name for key in all_keys().values() if ANY_NAME not in key.name]
    section, _, leaf = name.rpartition(".")
    beside = members(_starred(section)) if section else []
    longer = [f"{section}.{member}" for member in beside if f"_{leaf}_" in f"_{member}_"]
    fitting = [known for known in longer if value is None or _accepts(known, value)]
    if fitting:
        return fitting[:_MOST_LIKELY]
    same_leaf = [known for known in names if known.rpartition(".")[2] == leaf]
    if beside:
        by_leaf = {member: f"{section}.{member}" for member in beside}
    else:
        by_leaf = {known.rpartition(".")[2]: known for known in reversed(names)}
    # Names of two things are often as alike as `max_samples` and `max_staleness`, or `modules` and `nodes`.
    close = nearest(leaf, [known for known in by_leaf if _may_be_slip(leaf, known)], cutoff=0.78)
    near = nearest(name, same_leaf, cutoff=0.0) or (None if close is None else by_leaf[close])
    return [] if near is None else [near]


def _accepts(name: str, value: str) -> bool:
    key = find_key(name)
    return key is not None and accepts_text(key, value)


def _may_be_slip(written: str, meant: str) -> bool:
    return abs(len(written) - len(meant)) <= _MOST_LETTERS and written[:1].lower() == meant[:1].lower()


def _respell(name: str) -> str | None:
    """Correct the first part that is unknown, if that makes the whole name known."""
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        section = ".".join(parts[:index])
        if find_key(".".join(parts[: index + 1])) is None:
            member = nearest(part, members(_starred(section)), cutoff=0.7)
            if member is None:
                return None
            fixed = ".".join([*parts[:index], member, *parts[index + 1 :]])
            parent = find_key(".".join([*parts[:index], member]))
            return fixed if find_key(fixed) is not None or (parent is not None and parent.is_free) else None
    return None


def _starred(section: str) -> str:
    key = find_key(section)
    return section if key is None else key.name
