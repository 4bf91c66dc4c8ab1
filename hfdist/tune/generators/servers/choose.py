"""The inference servers of a run, from `task.server*`: opened, asked before the run, and their failures in words."""

from __future__ import annotations

import os
import re

from hfdist.config.run import RunConfig
from hfdist.config.task import InferenceServer
from hfdist.errors import ConfigError, HfdistError, PeerError
from hfdist.messages.message import NotAMessageError
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.tune.generators.servers.http_client import JsonClient, NoAnswerError, StatusError
from hfdist.tune.generators.servers.server import Request, Server
from hfdist.tune.generators.servers.sglang import SGLang
from hfdist.tune.generators.servers.vllm import Vllm

_WHERE = "task.server_addresses"
_KEY = r"[!-~]+"
"""What a key is: a header can hold it, and no line begins in it."""
FAILURES = (NoAnswerError, StatusError, NotAMessageError)
"""What calls of a server raise."""


def open_server(config: RunConfig, address: str, limits: GenerationLimits | None = None) -> Server:
    """Make the client of the server at an address. Nothing is sent.

    Args:
        config: config of the run.
        address: one of `task.server_addresses`.
        limits: limits of answers; None: the model is not known yet, and the server is not asked for answers.
    """
    task, data = config.task, config.data
    if limits is None:
        request = Request(task=task, max_new_tokens=task.max_new_tokens, end_ids=[], needed_tokens=0)
    else:
        longest = data.sequence_length + limits.max_new_tokens
        request = Request(
            task=task,
            max_new_tokens=limits.max_new_tokens,
            end_ids=sorted(limits.end_ids),
            needed_tokens=longest if limits.most_tokens is None else min(longest, limits.most_tokens),
        )
    key = None if task.server_key_variable is None else os.environ.get(task.server_key_variable)
    kind = Vllm if task.server is InferenceServer.vllm else SGLang
    return kind(JsonClient(address, key), request)


def ask_servers(config: RunConfig) -> None:
    """Ask each server what it is; ConfigError: one does not answer, or cannot serve this run."""
    variable = config.task.server_key_variable
    key = "" if variable is None else os.environ.get(variable, "")
    if variable is not None and re.fullmatch(_KEY, key) is None:
        raise ConfigError(
            "this variable has no key of the servers" if not key else "a key has letters, digits and signs alone",
            where="task.server_key_variable",
            found=variable,
            allowed="a variable of the environment that is set",
            hint=f"export {variable}=...",
        )
    for address in config.task.server_addresses:
        try:
            open_server(config, address).check()
        except FAILURES as error:
            raise ConfigError(
                _describe(error),
                where=_WHERE,
                found=f"{address}: {error}",
                allowed="the address of a server that runs",
                hint=_hint(config, error),
            ) from error


def failure(address: str, error: Exception) -> HfdistError:
    """Make the error of a server that has failed while the run has used it."""
    if isinstance(error, HfdistError):
        return error
    return PeerError(_describe(error), where=_WHERE, found=f"{address}: {error}", hint="what the server has logged")


def _describe(error: Exception) -> str:
    if isinstance(error, NotAMessageError):
        return "the server answers what no server of this model would"
    return "the server has refused" if isinstance(error, StatusError) else "the server does not answer"


def _hint(config: RunConfig, error: Exception) -> str:
    """Say what to do about a server that fails before the run."""
    if isinstance(error, NoAnswerError):
        return "start the server first; it is ready once its /v1/models answers"
    if isinstance(error, StatusError) and error.status in (401, 403):
        variable = config.task.server_key_variable or "HFDIST_SERVER_KEY"
        return f"export {variable}=KEY, as in the server's --api-key, and task.server_key_variable={variable}"
    return "task.server as the program that runs there, in a version that docs/generators.md names"
