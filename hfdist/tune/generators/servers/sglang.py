"""A server of SGLang.

/v1/models                     its model, and the longest sequence
/model_info                    the name of its weights
/update_weights_from_disk      other weights; it ends what is under way, and empties its cache
/generate                      answers, a prompt each
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hfdist.messages.message import NotAMessageError, as_message
from hfdist.tune.generators.servers.server import SEEDS, Completion, Server


class SGLang(Server):
    """Asks a server of SGLang."""

    _version_path = "/model_info"

    def load(self, folder: Path, name: str) -> None:
        """Let the server read its weights from a Hub folder, and name them; if it fails, it keeps the old ones."""
        asked = {"model_path": str(folder), "weight_version": name, "abort_all_requests": True, "flush_cache": True}
        said = as_message(self._client.post("/update_weights_from_disk", asked, seconds=self._seconds))
        if not said.flag("success"):
            raise NotAMessageError("the server has not read the weights")

    def complete(self, prompt: Sequence[int], seeds: Sequence[int]) -> list[Completion]:
        """Give an answer for each seed; seeds count where the server has `--enable-deterministic-inference`."""
        sampling = self._request.sampling() | {
            "max_new_tokens": self._request.max_new_tokens,
            "top_k": self._request.task.top_k or -1,
        }
        asked = {
            # Not one prompt with `n`: its answers would have one seed.
            "input_ids": [list(prompt)] * len(seeds),
            "sampling_params": [sampling | {"sampling_seed": seed % SEEDS} for seed in seeds],
            "return_logprob": True,
        }
        most_bytes = self._request.most_bytes(len(prompt), len(seeds))
        said = self._client.post("/generate", asked, seconds=self._seconds, most_bytes=most_bytes)
        if not isinstance(said, list) or len(said) != len(seeds):
            raise NotAMessageError(f"these are not {len(seeds)} answers to a prompt")
        return [_read(one, prompt) for one in said]


def _read(given: object, prompt: Sequence[int]) -> Completion:
    told = as_message(given).mapping("meta_info")
    if told.integer("prompt_tokens") != len(prompt):
        raise NotAMessageError("the server has read another prompt than it was sent")
    drawn = told.list("output_token_logprobs")
    if not all(isinstance(one, list) and len(one) >= 2 for one in drawn):
        raise NotAMessageError("a token has no log-probability")
    # A log-probability, a token and perhaps its text, each.
    return Completion([one[1] for one in drawn], [one[0] for one in drawn])
