"""Checks `task.server*`: who answers prompts in place of generators, and what such a server cannot do."""

from __future__ import annotations

import json
import re
from urllib.parse import urlsplit

from hfdist.config.checks.conflict import conflict
from hfdist.config.run import RunConfig
from hfdist.config.task import MOST_SERVERS, InferenceServer, TaskConfig
from hfdist.errors import ConfigError, printable

_ADDRESS = "http://HOST:PORT or https://HOST:PORT, each once"
_HINT = "task.server_addresses=[http://127.0.0.1:8000]"
_LABEL = r"[A-Za-z0-9_-]{1,63}"
"""A part of a host's name, between dots."""
_VARIABLE = r"(HFDIST|VLLM|SGLANG)_([A-Z0-9]+_)*(KEY|TOKEN)"


def check_servers(config: RunConfig) -> None:
    """Raise a ConfigError on servers that cannot be asked, or that cannot do what the run asks for."""
    task = config.task
    if task.server is None:
        what, allowed = "it is not said which program the servers are", "with task.server=vllm, or sglang"
        for key in ("server_addresses", "server_key_variable"):
            if found := getattr(task, key):
                raise ConfigError(what, where=f"task.{key}", found=str(found), allowed=allowed, hint="task.server=vllm")
        return
    _check_addresses(task)
    if task.server_key_variable is not None and re.fullmatch(_VARIABLE, task.server_key_variable) is None:
        what, key = "a config may send no other variable of the environment to a server", "task.server_key_variable"
        allowed = "a name such as VLLM_API_KEY, SGLANG_API_KEY or HFDIST_SERVER_KEY"
        raise conflict(config, key, what, allowed=allowed, hint=f"{key}=HFDIST_SERVER_KEY")
    in_place_of_generators = "prompts go to servers or to generators, not to both"
    for name, allowed, what in (
        ("generators", "0", in_place_of_generators),
        ("generators_port", "null", in_place_of_generators),
        ("environment", "null", "a server gives answers of one turn in this version"),
    ):
        if getattr(task, name):
            key = f"task.{name}"
            raise conflict(config, f"{key} task.server", what, allowed=allowed, hint=f"{key}={allowed}")
    if config.adapter.is_used:
        what, found = "a server reads whole models in this version", f"an adapter, with {_shown_server(task)}"
        raise ConfigError(what, where="adapter", found=found, allowed="none", hint="adapter=none")
    if task.server is InferenceServer.vllm and task.temperature != 1 and (task.top_k is not None or task.top_p != 1):
        raise ConfigError(
            "vLLM would give log-probabilities among the likeliest tokens, and the loss needs those among all",
            where="task.temperature",
            found=f"{task.temperature:g}, with {_shown_server(task)} and task.top_k or task.top_p",
            allowed="1, or task.top_k=null and task.top_p=1",
            hint="task.top_k=null task.top_p=1",
        )


def _shown_server(task: TaskConfig) -> str:
    assert task.server is not None
    return f"task.server={task.server.value}"


def _check_addresses(task: TaskConfig) -> None:
    found = task.server_addresses
    if len(found) > MOST_SERVERS:
        what = "a run asks each server before it begins, and these are too many"
        where, allowed = "task.server_addresses", f"<= {MOST_SERVERS} servers"
        raise ConfigError(what, where=where, found=f"{len(found):,} servers", allowed=allowed, hint=_HINT)
    if not found or len(set(found)) < len(found):
        what = "no server is named" if not found else "a server is named twice"
        shown = printable(json.dumps(found))
        raise ConfigError(what, where="task.server_addresses", found=shown, allowed=_ADDRESS, hint=_HINT)
    for address in found:
        if not _is_address(address):
            what, shown = "this is no address of a server", printable(address)
            raise ConfigError(what, where="task.server_addresses", found=shown, allowed=_ADDRESS, hint=_HINT)


def _is_address(address: str) -> bool:
    # No user, path or query: what follows is this project's to say.
    if re.fullmatch(rf"https?://({_LABEL}(\.{_LABEL})*\.?|\[[0-9A-Fa-f:.]+\]):\d{{1,5}}", address) is None:
        return False
    try:
        return bool(urlsplit(address).port)
    except ValueError:
        return False
