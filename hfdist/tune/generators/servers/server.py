"""What a run asks of an inference server, whichever it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from hfdist.config.task import TaskConfig
from hfdist.errors import ConfigError
from hfdist.messages.message import NotAMessageError, as_message
from hfdist.tune.generators.servers.http_client import JsonClient

CHECK_SECONDS = 20.0
"""The longest wait for what a server says of itself."""
SEEDS = 2**31
"""Number of seeds that a server takes."""
_BYTES_OF_TOKEN = 512
"""The most bytes of a token in an answer: its number, its text and its log-probability, as JSON, more than once."""


class Completion(NamedTuple):
    """One answer to a prompt."""

    tokens: list[int]
    """All tokens, the one that ended the answer included."""
    log_probabilities: list[float]
    """Log-probability of each token when it was drawn, at `task.temperature` over all tokens."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a run asks for with each prompt."""

    task: TaskConfig
    max_new_tokens: int
    end_ids: list[int]
    """Tokens that end an answer."""
    needed_tokens: int
    """Tokens of the longest prompt with its answer."""

    def sampling(self) -> dict[str, object]:
        """Give the settings of sampling that all servers call alike.

        All of them are given: a server would take others from the generation config of the model.
        """
        return {
            "temperature": self.task.temperature,
            "top_p": self.task.top_p,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": self.end_ids,
        }

    def most_bytes(self, num_prompt_tokens: int, num_answers: int) -> int:
        """Give the most bytes of the answers to a prompt."""
        return 2**20 + _BYTES_OF_TOKEN * num_answers * (num_prompt_tokens + self.max_new_tokens)


class Server(ABC):
    """An inference server. Each call raises what `JsonClient.post` does.

    Args:
        client: client of the server's address.
        request: what the run asks for with each prompt.
    """

    _version_path: ClassVar[str]
    """Path of the endpoint that names the server's weights."""

    def __init__(self, client: JsonClient, request: Request) -> None:
        self._client, self._request = client, request
        self._seconds = request.task.answer_seconds
        self._model = ""
        """The name under which the server has its model."""

    def check(self) -> None:
        """Learn the name of the server's model, before `complete`. ConfigError: the server cannot serve this run."""
        models = self._client.get("/v1/models", seconds=CHECK_SECONDS).list("data")
        if not models:
            raise NotAMessageError("the server has no model")
        # The first one is the model itself; adapters follow.
        model = as_message(models[0])
        most, needed = model.get("max_model_len"), self._request.needed_tokens
        if isinstance(most, int) and most < needed:
            raise ConfigError(
                "the server's model reads fewer tokens than a prompt and its answer may have",
                where="task.server_addresses",
                found=f"{self._client.address}: {most:,} tokens",
                allowed=f"{needed:,} or more: data.sequence_length + task.max_new_tokens",
                hint=f"start the server with a context of {needed} tokens",
            )
        self._model = model.text("id")
        self._check_endpoints()

    def _check_endpoints(self) -> None:
        """Raise a ConfigError if the server lacks what a run needs besides a model."""
        self.version()

    def version(self) -> str:
        """Give the name of the weights that the server has; one that nobody has named has a name of its own."""
        return str(self._client.get(self._version_path, seconds=CHECK_SECONDS).get("weight_version"))

    @abstractmethod
    def load(self, folder: Path, name: str) -> None:
        """Let the server read its weights from a Hub folder, and name them. No answer mixes two weights."""

    @abstractmethod
    def complete(self, prompt: Sequence[int], seeds: Sequence[int]) -> list[Completion]:
        """Give an answer for each seed.

        NotAMessageError: what comes is none, or the prompt was changed. `answer_check` looks at the tokens.
        """
