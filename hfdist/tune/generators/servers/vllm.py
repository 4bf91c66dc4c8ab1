"""A server of vLLM, version 0.30 or later, with the endpoints that `VLLM_SERVER_DEV_MODE=1` opens.

/v1/models, /server_info       its model, the longest sequence, and which log-probabilities it gives
/weight_info                   the name of its weights
/pause, /collective_rpc reload_weights, /reset_prefix_cache, /update_weight_version, /resume      other weights
/v1/completions                answers, a prompt each
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hfdist.errors import ConfigError
from hfdist.messages.message import Message, NotAMessageError, as_message
from hfdist.tune.generators.servers.http_client import StatusError
from hfdist.tune.generators.servers.server import CHECK_SECONDS, SEEDS, Completion, Server

_LOADING = "hfdist-loading"
"""Name of the weights while they are read: if that fails, they are no version's."""


class Vllm(Server):
    """Asks a server of vLLM."""

    _version_path = "/weight_info"

    def _check_endpoints(self) -> None:
        try:
            self.version()
            info = self._client.get("/server_info?config_format=json", seconds=CHECK_SECONDS)
        except StatusError as error:
            if error.status != 404:
                raise
            raise ConfigError(
                "this server has no endpoints that change its weights",
                where="task.server_addresses",
                found=f"{self._client.address}: {error}",
                allowed="vLLM 0.30 or later, with its development endpoints",
                hint="VLLM_SERVER_DEV_MODE=1 in the environment of the server",
            ) from error
        mode = info.mapping("vllm_config").mapping("model_config").get("logprobs_mode")
        task = self._request.task
        wanted = "raw_logprobs" if task.temperature == 1 else "processed_logprobs"
        if mode != wanted and not (mode == "processed_logprobs" and task.top_k is None and task.top_p == 1):
            raise ConfigError(
                "the server gives log-probabilities of another distribution than that of the loss",
                where="task.server_addresses",
                found=f"{self._client.address}: logprobs_mode {mode}, with task.temperature={task.temperature:g}",
                allowed=wanted,
                hint=f"start the server with --logprobs-mode {wanted}",
            )

    def load(self, folder: Path, name: str) -> None:
        """Let the server read its weights from a Hub folder, and name them, while it answers nothing."""
        self._post("/pause?mode=abort", {})
        # If the server fails from here on, it stays paused, and its weights have no version's name.
        self._post("/update_weight_version", {"new_version": _LOADING})
        self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        # The cache has keys and values that older weights have made.
        if self._post("/reset_prefix_cache", {}).get("success", True) is not True:
            raise NotAMessageError("the prefix cache still holds what older weights have computed")
        self._post("/update_weight_version", {"new_version": name})
        self._post("/resume", {})

    def complete(self, prompt: Sequence[int], seeds: Sequence[int]) -> list[Completion]:
        """Give an answer for each seed, from one request: to the first seed the server adds the answer's number."""
        asked = self._request.sampling() | {
            "model": self._model,
            "prompt": list(prompt),
            "n": len(seeds),
            "seed": seeds[0] % SEEDS,
            "max_tokens": self._request.max_new_tokens,
            "top_k": self._request.task.top_k or 0,
            # Our own list of end tokens is the whole one.
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        most_bytes = self._request.most_bytes(len(prompt), len(seeds))
        said = self._client.post("/v1/completions", asked, seconds=self._seconds, most_bytes=most_bytes)
        choices = [as_message(one) for one in as_message(said).list("choices")]
        if sorted(choice.integer("index") for choice in choices) != list(range(len(seeds))):
            raise NotAMessageError(f"these are not {len(seeds)} answers to a prompt")
        return [_read(choice, prompt) for choice in sorted(choices, key=lambda one: one.integer("index"))]

    def _post(self, path: str, content: dict[str, object]) -> Message:
        return as_message(self._client.post(path, content, seconds=self._seconds))


def _read(choice: Message, prompt: Sequence[int]) -> Completion:
    if choice.get("prompt_token_ids", list(prompt)) not in (None, list(prompt)):
        raise NotAMessageError("the server has read another prompt than it was sent")
    return Completion(choice.list("token_ids"), choice.mapping("logprobs").list("token_logprobs"))
