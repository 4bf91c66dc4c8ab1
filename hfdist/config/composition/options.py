"""Options of groups: which was meant where there is none of that name, and how a file chooses one."""

from __future__ import annotations

import difflib
import re

from hfdist.config.composition.aliases import override_for_option
from hfdist.config.composition.path_overrides import PATH_KEYS, hint_for_file, in_yaml
from hfdist.config.conf_folder import list_options, shipped_folder
from hfdist.config.run import TRACKERS
from hfdist.config.schema import OFF
from hfdist.errors import ConfigError, nearest


def unknown_option(group: str, option: str, options: list[str], place: str, hint: str | None) -> ConfigError:
    """Say that a group has no such option."""
    what, where = f"the group `{group}` has no option `{option}`", f"{group} ({place})"
    return ConfigError(what, where=where, found=option, allowed=", ".join(sorted(options)), hint=hint)


def override_for_synonym(group: str, option: str, options: list[str]) -> str | None:
    """Give the override for an option as others call it; None: nobody does."""
    is_off = option.lower() in OFF and "none" in options
    return f"{group}=none" if is_off else override_for_option(group, option)


def hint_for_option(group: str, option: str, options: list[str]) -> str | None:
    """Give the override that was probably meant; `options` are those of the group."""
    called = override_for_synonym(group, option, options)
    if called is not None:
        return called
    if group == "data":
        own = f"data=FILE.jsonl, or data=hub data.sources.hub.path=OWNER/{option}"
        return nearest(option, options, "data={}", cutoff=0.7) or own
    if group == "report" and option in TRACKERS:
        return f"report=default report.to=[{option}]"
    if group == "model":
        # A name of the Hub is as likely as one of ours, and `gpt2` is not `gpt2_xl`.
        near = difflib.get_close_matches(option.lower(), options, n=1, cutoff=0.8)
        same = [f"model={one}" for one in near]
        return ", or ".join(same if near == [option.lower()] else [*same, f"model=hub model.name={option}"])
    return nearest(option, options, group + "={}", cutoff=0.7)


def overrides_in_yaml(hint: str) -> str:
    """Write overrides as a file has them; a hint that is more than overrides stays as it is."""
    words = hint.split()
    if not all(re.match(r"'?[\w.]+=", word) for word in words):
        return hint
    pairs = [word.strip("'").partition("=") for word in words]
    return ", and ".join(_override_in_yaml(key, value) for key, _, value in pairs)


def _override_in_yaml(key: str, value: str) -> str:
    """Write one override as a file has it."""
    of_path = hint_for_file(key, value)
    if of_path is not None:
        return of_path
    if key in PATH_KEYS and value not in list_options(shipped_folder(), key):
        return f"`{in_yaml(PATH_KEYS[key], 'PATH' if value == '...' else value)}`"
    if "." in key:
        return f"`{in_yaml(key, value)}`"
    return f"`{defaults_line(key, value)}` in the defaults list"


def defaults_line(group: str, option: str) -> str:
    """Write the choice of an option as a defaults list has it; no recipe lists an experiment."""
    return f"- {group}: {option}" if group == "experiment" else f"- override /{group}: {option}"
