"""Stubs of vLLM and SGLang: their HTTP, with a real small model inside, and ways to fail.

They follow the documents and sources of vLLM 0.30 and SGLang 0.5: what they send, the cache of prompts that outlives
weights, requests that wait while the server is paused. None of their programs has run here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

NAME, MOST_TOKENS = "policy", 64


class Refused(Exception):
    """A request that the server answers with a status."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


class Engine:
    """A model that draws answers; prompts that were read once are in a cache until it is emptied."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        self._lock = threading.Lock()
        self._cache: dict[tuple[int, ...], torch.Tensor] = {}
        """Logits of the first token of an answer, by prompt."""

    def load(self, folder: Path) -> None:
        """Read the weights of a Hub folder; ValueError: they are another model's."""
        files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
        if not files:
            raise ValueError(f"no weights in {folder}")
        with self._lock, torch.no_grad():
            own = self._model.state_dict()
            for name, tensor in [pair for file in files for pair in file.items()]:
                if name not in own or own[name].shape != tensor.shape:
                    raise ValueError(f"size mismatch of {name}")
                own[name].copy_(tensor)

    def empty_cache(self) -> None:
        """Forget all prompts."""
        self._cache.clear()

    @torch.no_grad()
    def draw(
        self, prompt: Sequence[int], seed: int, most: int, ends: Sequence[int], temperature: float
    ) -> tuple[list[int], list[float], list[float]]:
        """Give an answer, and the log-probabilities of its tokens without and with the temperature."""
        generator, tokens = torch.Generator().manual_seed(seed), []
        raw, processed = [], []
        while len(tokens) < most and not (tokens and tokens[-1] in ends):
            with self._lock:
                logits = self._cache.get(tuple(prompt)) if not tokens else None
                if logits is None:
                    logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
                if not tokens:
                    self._cache[tuple(prompt)] = logits
            scaled = (logits / temperature).log_softmax(-1)
            tokens.append(int(torch.multinomial(scaled.exp(), 1, generator=generator)))
            raw.append(float(logits.log_softmax(-1)[tokens[-1]]))
            processed.append(float(scaled[tokens[-1]]))
        return tokens, raw, processed


class Stub:
    """What both have: a port, a key, and ways to fail.

    Args:
        folder: of its first weights.
        key: that it asks for; None: it asks for none.
        port: 0: any.
    """

    def __init__(self, folder: Path, *, key: str | None = None, port: int = 0, mode: str = "raw_logprobs") -> None:
        self.engine, self._key, self.mode = Engine(folder), key, mode
        self.version = "default"
        self.spoils: Callable[[str, Any], Any] = lambda path, answer: answer
        """Changes an answer before it is sent; bytes are sent as they are."""
        self.asked: list[str] = []
        """Paths of all requests."""
        self._running = threading.Event()
        self._running.set()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._http.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._http.server_port}"

    def serve(self) -> None:
        """Answer until `close`."""
        self._http.serve_forever(poll_interval=0.02)

    def close(self) -> None:
        """Serve no more."""
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path: str, key: str | None, body: dict[str, Any]) -> Any:
        """Give what is sent; Refused: the status."""
        self.asked.append(path)
        if self._key is not None and key != f"Bearer {self._key}":
            raise Refused(401, json.dumps({"error": "Unauthorized", "you sent": key}))
        return self.spoils(path, self.route(path, body))

    def route(self, path: str, body: dict[str, Any]) -> Any:
        """Give the answer of a path."""
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": NAME, "object": "model", "max_model_len": MOST_TOKENS}]}
        raise Refused(404, '{"detail": "Not Found"}')


class VllmStub(Stub):
    """vLLM with `VLLM_SERVER_DEV_MODE=1`."""

    def route(self, path: str, body: dict[str, Any]) -> Any:
        """See `Stub`."""
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/server_info?config_format=json":
            return {"vllm_config": {"model_config": {"logprobs_mode": self.mode}}, "vllm_env": {}}
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return {"success": True, "new_version": self.version}
        if path.startswith("/pause"):
            self._running.clear()
            return {"status": "paused"}
        if path == "/resume":
            self._running.set()
            return {"status": "resumed"}
        if path == "/reset_prefix_cache":
            self.engine.empty_cache()
            return {"success": True}
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            try:
                self.engine.load(Path(body["kwargs"]["weights_path"]))
            except ValueError as error:
                raise Refused(500, json.dumps({"error": {"message": str(error)}})) from error
            return {"results": [None]}
        if path == "/v1/completions":
            self._running.wait()
            return {"model": body["model"], "choices": [self._choice(body, number) for number in range(body["n"])]}
        return super().route(path, body)

    def _choice(self, body: dict[str, Any], number: int) -> dict[str, Any]:
        assert body["ignore_eos"]
        assert body["repetition_penalty"] == 1
        tokens, raw, processed = self.engine.draw(
            body["prompt"], body["seed"] + number, body["max_tokens"], body["stop_token_ids"], body["temperature"]
        )
        values = raw if self.mode == "raw_logprobs" else processed
        spelled = [f"token_id:{token}" for token in tokens]
        return {
            "index": number,
            "text": "".join(spelled),
            "token_ids": tokens,
            "prompt_token_ids": body["prompt"],
            "logprobs": {"tokens": spelled, "token_logprobs": values, "top_logprobs": [], "text_offset": []},
            "finish_reason": "stop" if tokens[-1] in body["stop_token_ids"] else "length",
        }


class SGLangStub(Stub):
    """SGLang, whose log-probabilities are those at the temperature."""

    def route(self, path: str, body: dict[str, Any]) -> Any:
        """See `Stub`."""
        if path == "/model_info":
            return {"model_path": NAME, "is_generation": True, "weight_version": self.version}
        if path == "/update_weights_from_disk":
            try:
                self.engine.load(Path(body["model_path"]))
            except ValueError as error:
                raise Refused(400, json.dumps({"success": False, "message": str(error)})) from error
            if body["flush_cache"]:
                self.engine.empty_cache()
            self.version = body["weight_version"]
            return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        if path == "/generate":
            return [self._answer(*one) for one in zip(body["input_ids"], body["sampling_params"], strict=True)]
        return super().route(path, body)

    def _answer(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        ends = sampling["stop_token_ids"]
        tokens, _, processed = self.engine.draw(
            prompt, sampling["sampling_seed"], sampling["max_new_tokens"], ends, sampling["temperature"]
        )
        reason = {"type": "stop", "matched": tokens[-1]} if tokens[-1] in ends else {"type": "length"}
        return {
            "text": "",
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": reason,
                "prompt_tokens": len(prompt),
                "weight_version": self.version,
                "output_token_logprobs": [[value, token, None] for value, token in zip(processed, tokens, strict=True)],
            },
        }


STUBS: dict[str, type[Stub]] = {"vllm": VllmStub, "sglang": SGLangStub}


@contextmanager
def serving(stub: Stub) -> Iterator[Stub]:
    """Serve in a thread of this process."""
    thread = threading.Thread(target=stub.serve, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        stub.close()
        thread.join()


def _handler(stub: Stub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: dict[str, Any]) -> None:
            status, headers = 200, {}
            try:
                found = stub.answer(self.path, self.headers["Authorization"], body)
                content = found if isinstance(found, bytes) else json.dumps(found).encode()
            except Refused as error:
                status, content = error.status, str(error).encode()
                headers = {"Location": stub.address} if status in range(300, 400) else {}
            with suppress(OSError):  # the client has gone
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    return Handler
