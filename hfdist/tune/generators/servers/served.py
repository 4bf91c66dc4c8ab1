"""A generator without a model: it has a server answer, with the weights of the version that is asked for.

    version(): another name   ->   load(folder, name)   ->   complete, a prompt each, at once   ->   version(): the name

A name is of one version of one start of one run. So the answers count only if the server had these weights before the
first of them and after the last: neither a server that was started again, nor another run that uses it, goes unseen.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hfdist.errors import HfdistError
from hfdist.messages.message import NotAMessageError, as_message
from hfdist.tune.answer import Answer
from hfdist.tune.generators.answer_check import AnswerCheck
from hfdist.tune.generators.answers import write_answers
from hfdist.tune.generators.messages import Link
from hfdist.tune.generators.servers.choose import FAILURES, failure, open_server
from hfdist.tune.generators.servers.http_client import NoAnswerError, StatusError
from hfdist.tune.generators.servers.server import Completion, Server
from hfdist.tune.generators.serving import serve
from hfdist.tune.generators.settings import Settings
from hfdist.tune.generators.versions import version_files

_AT_ONCE = 64
"""Prompts that a server gets at once."""
_RETRY_SECONDS = 1.0
_STARTING = (502, 503, 504)
"""Statuses of a server that is not ready, and of a proxy in front of one that is not there."""


class ServedGenerator:
    """Answers as `Generator` does.

    Args:
        settings: settings of the run's generators.
        policy: folder of all versions, which the server sees under the same path.
        server: server that answers.
        start: name of this start of the run; no other start has it.
    """

    def __init__(self, settings: Settings, policy: Path, server: Server, start: str) -> None:
        task, self._limits = settings.config.task, settings.limits
        self._policy, self._server, self._start = policy, server, start
        self._check = AnswerCheck(
            num_generations=task.num_generations,
            max_new_tokens=settings.limits.max_new_tokens,
            vocabulary=settings.vocabulary,
        )

    def answer(self, rollback: int, version: int, prompts: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
        """Answer prompts by a version of the policy, as `Generator.answer` does.

        Raises:
            FileNotFoundError: the version has been removed.
            NoAnswerError, StatusError, NotAMessageError: the server has failed, or has other weights.
        """
        name = f"{self._start}-{rollback}-{version}"
        if self._server.version() != name:
            folder = version_files(self._policy, rollback, version)[0].parent
            try:
                self._server.load(folder, name)
            except FAILURES:
                # The version may have been removed while the server has read it.
                version_files(self._policy, rollback, version)
                raise
            self._expect(name)
        with ThreadPoolExecutor(max_workers=min(len(prompts), _AT_ONCE)) as pool:
            answers = list(pool.map(self._complete, prompts))
        self._expect(name)
        return answers

    def _complete(self, prompt: dict[str, Any]) -> dict[str, object]:
        completions = self._server.complete(prompt["tokens"], prompt["seeds"])
        written = write_answers([Answer.of(*one) for one in completions])
        self._check.count_tokens(as_message(written))
        for one in completions:
            self._check_end(one)
        return {"number": prompt["number"], **written}

    def _check_end(self, answer: Completion) -> None:
        """Refuse an answer that ends where the run's own model would go on, or goes on where it would end."""
        places = [place for place, token in enumerate(answer.tokens) if token in self._limits.end_ids]
        last = len(answer.tokens) - 1
        if places[:1] != [last] and (places or last + 1 < self._limits.max_new_tokens):
            raise NotAMessageError("an answer ends without an end token of the run's model, or goes on after one")
        # Rounding may leave a little more than 0.
        if max(answer.log_probabilities) > 1e-3:
            raise NotAMessageError("a log-probability is above 0")

    def _expect(self, name: str) -> None:
        found = self._server.version()
        if found != name:
            raise NotAMessageError(f"it has weights {found[:100]!r} in place of {name!r}: was it started again?")


def serve_by_server(settings: Settings, policy: Path, index: int, *, start: str, broker: Link) -> None:
    """Serve with the server of this number, once it answers, until the run ends.

    If the server fails, this process ends with the exit code of the error, which it prints; the run starts another one.
    """
    task = settings.config.task
    address = task.server_addresses[index]
    server = open_server(settings.config, address, settings.limits)
    try:
        wait_until_ready(server, task.answer_seconds)
        serve(ServedGenerator(settings, policy, server, start), broker)
    except (*FAILURES, HfdistError) as error:
        made = failure(address, error)
        sys.stderr.write(f"{made}\n")
        sys.exit(made.exit_code)


def wait_until_ready(server: Server, seconds: float) -> None:
    """Wait for a server that is being started again."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            server.check()
            return
        except (NoAnswerError, StatusError) as error:
            is_starting = isinstance(error, NoAnswerError) or error.status in _STARTING
            if not is_starting or time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECONDS)
