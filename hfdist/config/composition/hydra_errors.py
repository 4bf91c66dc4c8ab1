"""Turns what Hydra and OmegaConf raise into one ConfigError: key, place, value, what is allowed, and a way out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

from hfdist.config.composition.aliases import OWN_REWARD, VALUES, override_for, override_for_option, reason_against
from hfdist.config.composition.files import display, read_config
from hfdist.config.composition.overrides import COMMAND_LINE, GivenOverride, hint_for_file, in_yaml
from hfdist.config.composition.quantities import read_quantity
from hfdist.config.conf_folder import list_groups, list_options, shipped_folder
from hfdist.config.run import AUTO, TRACKERS
from hfdist.config.schema import OFF, all_keys, find_key, flatten, likely_keys, members, nearest_key, unknown_keys
from hfdist.errors import ConfigError, first_line, nearest
from hfdist.records.run_folder import is_run_folder

_REWARDS = "task.rewards"
_NO_LOSSES = ("simpo", "orpo", "cpo", "exo_pair", "nca_pair", "sppo_hard", "bco_pair")
"""Losses of TRL that are none here."""
_OPTION_NAMES = ("name", "type", "option", "preset", "kind")
"""What people call the option of a group within its section."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was to be composed."""

    config_name: str
    overrides: Sequence[GivenOverride]
    folders: tuple[Path, ...]
    """Searched in this order."""

    def groups(self) -> dict[str, list[str]]:
        """Give every group with its options, over all folders."""
        found: dict[str, set[str]] = {}
        for folder in self.folders:
            for group in list_groups(folder):
                found.setdefault(group, set()).update(list_options(folder, group))
        return {group: sorted(options) for group, options in found.items()}

    def file(self, config_path: str) -> Path | None:
        """Give the file of an option such as `optimizer/adamw`; None: there is none."""
        paths = (folder / f"{config_path.removesuffix('.yaml')}.yaml" for folder in self.folders)
        return next((path for path in paths if path.is_file()), None)

    def value_of(self, key: str) -> str | None:
        """Give what the command line sets a key or group to; None: it does not."""
        return next((given.value_text for given in self.overrides if given.key.partition("@")[0] == key), None)


def explain(error: Exception, request: Request) -> ConfigError:
    """Translate an exception that Hydra raised while composing."""
    if isinstance(error, MissingConfigException):
        return _missing_config(error, request)
    cause = _omegaconf_cause(error)
    override = _override_of(error, request)
    if override is not None and override.text.startswith("~"):
        hint = f"{override.key}=... or another option of the group"
        where = f"{override.key} ({COMMAND_LINE})"
        return ConfigError("keys cannot be deleted, only set", where=where, found=override.text, hint=hint)
    if override is not None and isinstance(cause, ConfigTypeError):
        what, where = f"this override does not fit: {first_line(cause)}", f"{override.key} ({COMMAND_LINE})"
        allowed, names = _allowed(override.key), str(override.value_text).strip("[]").split(",")
        way_out = _weighted(names) if override.key == _REWARDS else None
        return ConfigError(what, where=where, found=override.text, allowed=allowed, hint=way_out)
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        key = str(cause.full_key)
        if override is not None and f"{override.key}.".startswith(f"{key}."):
            # Hydra names the section that lacks it.
            key = override.key
        value = None if override is None else override.value_text
        return unknown_key(key, value, _place(error, override, key, request), request)
    if cause is not None:
        return _bad_value(cause, error, override, request)
    return _bad_group(error, request)


def unknown_key(key: str, value: object, place: str, request: Request) -> ConfigError:
    """Say that there is no such key, and which one was probably meant."""
    where, reason, groups = f"{key} ({place})", reason_against(key), request.groups()
    if value is None and place != COMMAND_LINE:
        value = _value_in_file(key, request)
    if reason is not None:
        return ConfigError("there is no such key", where=where, found=value, hint=reason)
    if find_key(key) is not None and place != COMMAND_LINE:
        what = "a key with dots is a name of its own in a file"
        return ConfigError(what, where=where, found=key, hint=f"`{in_yaml(key, '...' if value is None else value)}`")
    what = f"there is no key `{key}`" if "." in key else f"there is no key or group `{key}`"
    section = key.rpartition(".")[0]
    parent = find_key(section)
    known = [] if parent is None else members(parent.name)
    allowed = (
        f"in {section}: {', '.join(known)}" if known else f"groups and sections: {_listed([*groups, *members('')])}"
    )
    hint = _hint_for_unknown(key, value, groups)
    if place != COMMAND_LINE:
        hint = _hint_for_section(key, request) or (None if hint is None else _in_file(hint))
    return ConfigError(what, where=where, found=value, allowed=allowed, hint=hint)


def _hint_for_section(key: str, request: Request) -> str | None:
    """Say what a file has in place of a misspelt section, or of an option's name within one; None: it is neither."""
    section, _, leaf = key.rpartition(".")
    if not section and override_for(key) is None:
        near = nearest(key, members(""), cutoff=0.7)
        return None if near is None else f"`{near}:` in place of `{key}:`"
    groups = request.groups()
    if section not in groups or leaf not in (*_OPTION_NAMES, *groups[section]):
        return None
    option = _value_in_file(key, request)
    if leaf in groups[section]:
        if isinstance(option, str):
            # A path, such as that of `data: {files: train.jsonl}`.
            return None
        option = leaf
    return f"`{_choice(section, option)}` in the defaults list" if option in groups[section] else None


def _value_in_file(key: str, request: Request) -> object:
    """Give what the primary config has for a key; None: nothing, or it is hfdist's own."""
    path = request.file(request.config_name)
    return None if path is None else dict(flatten(read_config(path), "")).get(key)


def _in_file(hint: str) -> str:
    """Write overrides as a file has them; a hint that is more than overrides stays as it is."""
    words = hint.split()
    if not all(re.match(r"'?[\w.]+=", word) for word in words):
        return hint
    pairs = [word.strip("'").partition("=") for word in words]

    def line(key: str, value: str) -> str:
        if key in ("model", "data") and value not in list_options(shipped_folder(), key):
            path = "PATH" if value == "..." else value
            found = hint_for_file(key, value)
            return found or f"`{in_yaml('model.name' if key == 'model' else 'data.sources.files.path', path)}`"
        is_option = "." not in key and hint_for_file(key, value) is None
        of_group = f"`{_choice(key, value)}` in the defaults list"
        return of_group if is_option else hint_for_file(key, value) or f"`{in_yaml(key, value)}`"

    return ", and ".join(line(key, value) for key, _, value in pairs)


def _choice(group: str, option: str) -> str:
    """Write the choice of an option as a defaults list has it; no recipe lists an experiment."""
    return f"- {group}: {option}" if group == "experiment" else f"- override /{group}: {option}"


def check_keys(config: DictConfig, request: Request) -> None:
    """Raise a ConfigError on keys that the dataclasses do not know: `+key=value` adds them in spite of the types."""
    values: Any = OmegaConf.to_container(config, resolve=False)
    as_given = {override.key: override.value_text for override in request.overrides}
    for key, value in unknown_keys(values):
        raise unknown_key(key, as_given.get(key, value), COMMAND_LINE, request)
    for section in ("train", "adapter"):
        given = values[section]["arguments"]
        # A reference to another section is text here.
        for name, value in given.items() if isinstance(given, Mapping) else ():
            refuse_own(f"{section}.arguments.{name}", value)


def refuse_own(key: str, value: object) -> None:
    """Refuse a name in `train.arguments` or `adapter.arguments` for which hfdist has a key of its own."""
    own = key.replace(".arguments.", ".")
    # Here, None is what the file says.
    given = "null" if value is None else value
    hint = override_for(key, given) or reason_against(key) or (f"{own}={value}" if find_key(own) else None)
    if hint is not None and key not in hint:
        what = "hfdist sets this argument itself, from a key of its own"
        raise ConfigError(what, where=key, found=value, hint=hint)


def missing_value(key: str) -> ConfigError:
    """Say that a key that stands as `???` was not given."""
    hint = f"{key}=... on the command line"
    return ConfigError("a value is missing", where=key, found="???", allowed=_allowed(key), hint=hint)


def explain_interpolation(error: OmegaConfBaseException) -> ConfigError:
    """Translate what OmegaConf raises while it resolves `${...}`."""
    message = first_line(error)
    missing = re.search(r"Interpolation key '([^']+)' not found", message)
    called = (override_for(missing[1]) or "").partition("=")[0] if missing else ""
    near = called if find_key(called) else nearest_key(missing[1]) if missing else None
    if near == error.full_key:
        # It would refer to itself.
        near = None
    if missing and re.fullmatch(r"[A-Z_0-9]+", missing[1]):
        what, key = "no config reads the environment", error.full_key or None
        hint = f'{key}="${missing[1]}" on the command line, where the shell puts it in' if key else None
        return ConfigError(what, where=key, found=f"${{{missing[1]}}}", hint=hint)
    what, allowed = f"an interpolation cannot be resolved: {message}", "${section.key} of a key that has a value"
    return ConfigError(what, where=error.full_key or None, allowed=allowed, hint=f"${{{near}}}" if near else None)


def _missing_config(error: MissingConfigException, request: Request) -> ConfigError:
    name = (error.missing_cfg_file or "").removesuffix(".yaml")
    group, _, option = name.rpartition("/")
    group = group.lstrip("/")
    if not group:
        names = {path for folder in request.folders for path in list_options(folder, ".")}
        where = f"--config-name ({COMMAND_LINE})" if name == request.config_name else f"defaults list: {name}"
        hint = nearest(name, sorted(names), "--config-name {}")
        return ConfigError(
            "there is no such primary config", where=where, found=name, allowed=_listed(names), hint=hint
        )
    if name == request.config_name and Path(f"{name}.yaml").is_file():
        what, hint = "a primary config by its name lies in the folder of --config-dir", f"--config {name}.yaml"
        raise ConfigError(what, where=f"--config-name ({COMMAND_LINE})", found=name, hint=hint)
    groups, place = request.groups(), _file_place(error, request) or COMMAND_LINE
    options = groups.get(group, [])
    if not options:
        hint = nearest(group, sorted(groups), f"{{}}: {option}")
        return ConfigError(f"there is no group `{group}`", where=place, found=name, allowed=_listed(groups), hint=hint)
    if any((folder / f"{name}.yml").is_file() for folder in request.folders):
        hint = f"rename {option}.yml to {option}.yaml"
    else:
        own = f"add {group}/{option}.yaml to a folder and give --config-dir"
        hint = _option_hint(group, option, options) or own
    return no_option(group, option, options, _chooser(group, option, request) or place, hint)


def _called(group: str, option: str, options: list[str]) -> str | None:
    """Give the override for an option as others call it; None: nobody does."""
    is_off = option.lower() in OFF and "none" in options
    return f"{group}=none" if is_off else override_for_option(group, option)


def _option_hint(group: str, option: str, options: list[str]) -> str | None:
    called = _called(group, option, options)
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


def no_option(group: str, option: str, options: list[str], place: str, hint: str | None) -> ConfigError:
    """Say that a group has no such option."""
    what, where = f"the group `{group}` has no option `{option}`", f"{group} ({place})"
    return ConfigError(what, where=where, found=option, allowed=_listed(options), hint=hint)


def _chooser(group: str, option: str, request: Request) -> str | None:
    """Name who chose an option: the command line, or the file of an experiment that it names."""
    for override in request.overrides:
        chosen = override.value_text.strip("'\"")
        if override.key == group and chosen == option:
            return COMMAND_LINE
        path = request.file(f"{override.key}/{chosen}")
        if path is not None and re.search(rf"{group}\s*:\s*{re.escape(option)}\b", path.read_text(encoding="utf-8")):
            return display(path)
    return None


def _bad_value(
    cause: OmegaConfBaseException, error: Exception, override: GivenOverride | None, request: Request
) -> ConfigError:
    if isinstance(cause, InterpolationResolutionError):
        return explain_interpolation(cause)
    key = cause.full_key or (override.key if override is not None else "")
    merged = re.search(r"not a subclass of (\w+)\. value: (.*)", str(cause))
    if merged and not key:
        key = next((k.name for k in all_keys().values() if getattr(k.type, "__name__", "") == merged[1]), "")
    value = merged[2] if merged and cause.value is None else cause.value
    if override is not None and value in (None, {}):
        value = override.value_text
    if not key and "with ListConfig" in str(cause):
        key, value = next(_lists_for_mappings(request), ("", value))
    allowed, options = _allowed(key), request.groups().get(key, [])
    if key.startswith("task.rewards."):
        what, found = "a reward has a weight", f"{key.removeprefix('task.rewards.')}: {value}"
        hint = OWN_REWARD if ".py" in found else None
        return ConfigError(what, where="task.rewards", found=found, allowed="{NAME: WEIGHT}", hint=hint)
    place = _place(error, override, key, request)
    is_in_file = override is None and not place.startswith(COMMAND_LINE)
    of_source = None if isinstance(value, dict | list) else _hint_for_source(key, str(value))
    if options and isinstance(value, str):
        hint = (hint_for_file(key, value) if is_in_file else None) or _called(key, value, options)
        hint = hint or nearest(value, options, key + "={}")
        if is_in_file and hint is None and key == "model":
            hint = f"`{in_yaml('model.name', value)}`"
    else:
        hint = None if allowed is None else of_source or _hint_for_value(key, value, allowed)
    if key.endswith("]"):
        # An entry of a list.
        hint = nearest(str(value), re.findall(r"\w+", allowed or ""), key.partition("[")[0] + "=[{}]")
    if hint and is_in_file:
        option, leaf = hint.strip("'").removeprefix(f"{key}="), key.rpartition(".")[2]
        if option == hint.strip("'") or " " in option:
            hint = _in_file(hint)
        else:
            of_group = f"`{_choice(key, option)}` in the defaults list of the file, in place of this line"
            hint = of_group if options else f"`{leaf}: {option}` in {place}"
    what = "the value has the wrong type or is not among the allowed"
    if of_source is not None and not is_in_file:
        what = "there is no source in this value: each has a name, and keys of its own"
    found = repr(value) if isinstance(value, str) else value
    if re.search(r"not Optional|Incompatible value 'None'", str(cause)):
        what, found = "this key needs a value, not null", "null"
    return ConfigError(what, where=f"{key} ({place})" if key else place, found=found, allowed=allowed, hint=hint)


def _lists_for_mappings(request: Request) -> Iterator[tuple[str, object]]:
    """Give the keys of the primary config that have a list where names with values belong."""
    path = request.file(request.config_name)
    values = {} if path is None else read_config(path)
    for name, value in flatten(values, ""):
        known = find_key(name) if name else None
        if known is not None and isinstance(value, list) and not known.takes_list:
            yield name, value


def _bad_group(error: Exception, request: Request) -> ConfigError:
    """Translate what Hydra says of groups, and whatever else it says."""
    message, groups = first_line(error), request.groups()
    missing = re.match(r"(?:In '[^']+': )?Could not override '([^'@]+)", message)
    if missing:
        group, value = missing[1], request.value_of(missing[1])
        place = COMMAND_LINE if value is not None else _place(error, None, group, request)
        if group not in groups:
            return unknown_key(group, value, place, request)
        what = f"the primary config `{request.config_name}` lists no group `{group}`: no option can be replaced"
        keys = members(group)
        hint = f"single keys, such as {group}.{keys[0]}=..., or --config-name pretrain" if keys else None
        return ConfigError(what, where=f"{group} ({place})", found=value, hint=hint)
    twice = re.match(r"(\S+) appears more than once in the final|Multiple values for (\S+)\.", message)
    if twice:
        group = (twice[1] or twice[2]).partition("@")[0]
        what, value = f"two options of the group `{group}` are chosen", request.value_of(group)
        if value is None:
            return _twice_in_a_file(what, group, _file_place(error, request, group) or "a defaults list")
        hint = f"{group}={value} (without the +), or `override /{group}: {value}` in a file's defaults list"
        return ConfigError(what, where=f"{group} ({COMMAND_LINE})", found=f"+{group}={value}", hint=hint)
    for override in request.overrides:
        if override.key in groups and not isinstance(override.value, (str, list)):
            group, options = override.key, groups[override.key]
            option = override.value_text
            hint = _called(group, option, options) or f"{group}={options[0]}"
            return no_option(group, option, options, COMMAND_LINE, hint)
    place = _file_place(error, request) or request.config_name
    late = re.search(r"Override '[^']+' is defined before '([^']+)'", message)
    if late:
        return ConfigError(
            "a line of the defaults list stands after an override",
            where=place,
            hint=f"`- {late[1]}` before the first `override`",
        )
    return ConfigError(f"the config cannot be composed: {message}", where=place)


def _twice_in_a_file(what: str, group: str, place: str) -> ConfigError:
    hint = f"`- override /{group}: OPTION` in place of `- {group}: OPTION`"
    return ConfigError(what, where=f"{group} ({place})", hint=hint)


def _omegaconf_cause(error: BaseException) -> OmegaConfBaseException | None:
    """Give the exception of OmegaConf that knows the key, at whatever depth Hydra has wrapped it."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OmegaConfBaseException) and link.full_key is not None:
            return link
        link = link.__cause__ or link.__context__
    return None


def _override_of(error: Exception, request: Request) -> GivenOverride | None:
    message = str(error)
    for override in request.overrides:
        if message.startswith(f"Error merging override {override.for_hydra}"):
            return override
        if re.match(
            rf"Could not (override|delete from config\.|delete) ?'?{re.escape(override.key)}(?![\w.])", message
        ):
            return override
    return next((o for o in request.overrides if o.text.startswith("~") and o.key in message), None)


def _place(error: Exception, override: GivenOverride | None, key: str, request: Request) -> str:
    return COMMAND_LINE if override is not None else _file_place(error, request, key) or COMMAND_LINE


def _file_place(error: Exception, request: Request, key: str = "") -> str | None:
    """Name the file that Hydra names, with the line of the key where that is certain."""
    named = re.search(r"\b[Ii]n '?([\w./-]+?)'?(?=[:,])", str(error))
    path = request.file(named[1]) if named else None
    if path is None:
        return None
    leaf = re.escape(key.rpartition(".")[2])
    lines = path.read_text(encoding="utf-8").splitlines()
    hits = [number for number, line in enumerate(lines, 1) if leaf and re.match(rf"\s*(- )?{leaf}\s*:", line)]
    return f"{display(path)}, line {hits[0]}" if len(hits) == 1 else display(path)


def _hint_for_unknown(key: str, value: object, groups: dict[str, list[str]]) -> str | None:
    section, _, leaf = key.rpartition(".")
    is_section = leaf != key and leaf in members("") and members(leaf)
    hint = override_for(key, value)
    if hint is not None and not (is_section and (value is None or isinstance(value, dict))):
        return hint
    text = "..." if value is None or isinstance(value, (dict, list)) else value
    if section == "data" and find_key(f"data.sources.files.{leaf}") is not None:
        source = "hub" if leaf in ("subset", "split", "revision") else "files"
        return f"data={source} data.sources.{source}.{leaf}={text}"
    if section.startswith("data.sources.") and leaf == "type":
        # As axolotl calls the format.
        return f"{section}.format={VALUES['data.format'].get(str(text), text)}"
    if is_section:
        return f"`{leaf}:` is a section of its own, beside `{key.partition('.')[0]}:`"
    if "." not in key:
        near = nearest(key, groups, cutoff=0.7)
        if near is not None:
            return f"{near}={nearest(str(text), groups[near], cutoff=0.6) or groups[near][0]}"
    likely = likely_keys(key, None if value is None else str(text))
    if len(likely) > 1:
        return ", or ".join(f"{near}={text}" for near in likely)
    near = next(iter(likely), None)
    known = None if near is None else find_key(near)
    if near is not None and (number := read_quantity(near, str(text))) is not None:
        text = number
    if known is not None and members(known.name):
        return f"{near}.{members(known.name)[0]}=..."
    if near is None:
        return None
    if find_key(section) is not None and not near.startswith(f"{section}."):
        # The same word may mean another thing in another section.
        return f"{near}={text}, if that is meant" if known is None or known.accepts(str(text)) else None
    return f"{near}={text}" if known is None or known.accepts(str(text)) else f"{near}, which takes {known.allowed}"


def _hint_for_source(key: str, value: str) -> str | None:
    """Say how a source is given, where a path or one of its keys stands in its place; None: it is no source."""
    section, _, name = key.rpartition(".")
    if key == "data.eval_sources":
        return f"data.eval_fraction=0 {key}.val.path={value}"
    if section not in ("data.sources", "data.eval_sources"):
        return None
    source = "files" if section == "data.sources" else "val"
    if find_key(f"{section}.{source}.{name}") is None:
        return f"{key}.path={value}"
    return f"data={value}" if (source, name) == ("files", "path") else f"{section}.{source}.{name}={value}"


def _hint_for_value(key: str, value: object, allowed: str) -> str | None:
    if key == "launch" and (str(value).isdecimal() or value == AUTO):
        return f"launch.processes={value}"
    if key == "launch" and (shipped_folder() / key / f"{value}.yaml").is_file():
        return f"accelerate launch --config_file conf/launch/{value}.yaml recipes/pretrain.py"
    if key == "task.loss" and str(value).startswith("kto"):
        return "task.loss=sigmoid for pairs; one answer a row, with its label, is another task: kto"
    if key == "task.loss" and value in ("grpo", "dr_grpo", "bnpo", "dapo"):
        return "without task.loss: grpo has one loss; task.scale_rewards=false is what Dr. GRPO changes"
    if key == "strategy.deepspeed" and str(value).endswith((".yaml", ".yml")):
        return "a file of JSON, whose name ends in .json"
    if key == "run" and is_run_folder(str(value)):
        return f"--config {value}/config.yaml has the config of that run"
    if key == "task.loss" and value in _NO_LOSSES:
        return f"{key}=sigmoid, which is DPO's own: {value} is not among the losses"
    if key == "data.sources" and isinstance(value, list):
        return f"`{in_yaml('data.sources.files.path', 'PATH')}`: each source has a name"
    if allowed.startswith("a list"):
        return f"'{key}=[{value}]'"
    if key == "optimizer.warmup_steps" and isinstance(value, float) and 0 < value < 1:
        return f"{key}=0 optimizer.warmup_fraction={value}"
    if isinstance(value, float) and value.is_integer() and "whole number" in allowed:
        return f"{key}={int(value)}"
    if key == "model.dtype" and str(value) in ("fp16", "half", "16"):
        return f"{key}=float32 train.precision=fp16"
    if (number := read_quantity(key, str(value))) is not None:
        return f"{key}={number}"
    called = VALUES.get(key, {}).get(str(value).lower() if isinstance(value, bool) else str(value))
    if called is not None:
        return f"{key}={called}"
    if key == _REWARDS and isinstance(value, str | list):
        return _weighted([value] if isinstance(value, str) else value)
    words = [word for word in allowed.replace(" or ", ", ").split(", ") if " " not in word]
    return nearest(str(value), words, key + "={}")


def _weighted(names: Iterable[str]) -> str:
    """Give the override for rewards of these names; one that a file names is called as its function."""
    own = [re.findall(r"\w+", str(name).strip(" '\"").removesuffix(".py"))[-1:] for name in names]
    return f"'{_REWARDS}={{{', '.join(f'{name}: 1.0' for last in own for name in last)}}}'"


def _allowed(key: str) -> str | None:
    # Of a list, an entry may be wrong: key[0].
    known = find_key(key.partition("[")[0])
    return None if known is None else known.allowed


def _listed(words: Iterable[str]) -> str:
    return ", ".join(sorted({*words}))
