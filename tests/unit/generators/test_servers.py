"""What a server of vLLM or SGLang may do instead of answering: each is one error, in time, and no answer counts."""

import socket
import threading
import time
from contextlib import suppress

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hfdist.config.composition.compose import compose_config
from hfdist.errors import ConfigError, PeerError
from hfdist.messages.message import NotAMessageError
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.tune.generators.servers.choose import ask_servers, failure, open_server
from hfdist.tune.generators.servers.http_client import JsonClient, NoAnswerError, StatusError
from hfdist.tune.generators.servers.served import ServedGenerator, wait_until_ready
from hfdist.tune.generators.settings import Settings
from tests.inference_servers import STUBS, Refused, serving

LIMITS = GenerationLimits(max_new_tokens=5, end_ids=frozenset({1}), most_tokens=None)
PROMPTS = [{"number": number, "tokens": [3 + number, 4], "seeds": [7, 8, 9]} for number in range(2)]
SECRET = "of-the-servers"


def write(folder, width=16, seed=0):
    """A Hub folder of a model so wide."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2, "vocab_size": 12, "initializer_range": 0.5}  # fmt: skip
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A folder of versions, of which 3 is the one of another model."""
    folder = tmp_path_factory.mktemp("policy")
    for version in range(3):
        write(folder / f"0-{version}", seed=version)
    write(folder / "0-3", width=8)
    return folder


@pytest.fixture(params=STUBS)
def stub(request, policy):
    """A server with the weights of version 0."""
    with serving(STUBS[request.param](policy / "0-0", key=SECRET)) as made:
        made.name = request.param
        yield made


def config_of(stub, *overrides):
    return compose_config(
        [
            "model=tiny",
            "task=grpo",
            "data.sources.files.path=sums.jsonl",
            "data.sequence_length=16",
            "task.rewards={arithmetic: 1.0}",
            "task.num_generations=3",
            f"task.server={stub.name}",
            f"task.server_addresses=['{stub.address}']",
            "task.server_key_variable=HFDIST_SERVER_KEY",
            *overrides,
        ],
        name="tune",
    )


@pytest.fixture
def make(stub, policy, monkeypatch):
    """Makes a generator that asks the stub."""
    monkeypatch.setenv("HFDIST_SERVER_KEY", SECRET)

    def made(*overrides):
        settings = Settings(config=config_of(stub, *overrides), vocabulary=12, limits=LIMITS)
        server = open_server(settings.config, stub.address, LIMITS)
        server.check()
        return ServedGenerator(settings, policy, server, "start")

    return made


def expected(policy, version, answer, temperature=1.0):
    """Log-probabilities of an answer to the first prompt, by the files of a version."""
    model = AutoModelForCausalLM.from_pretrained(policy / f"0-{version}", dtype="float32")
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPTS[0]["tokens"], *answer]])).logits[0, 1:-1] / temperature
    return logits.log_softmax(-1)[range(len(answer)), answer].tolist()


def test_answers_are_of_the_version_that_is_asked_for(make, stub, policy):
    generator, drawn = make(), []
    for version in (0, 1, 1, 2):
        first, second = generator.answer(0, version, PROMPTS)
        assert (first["number"], second["number"]) == (0, 1)
        assert len(first["completions"]) == 3
        for answer, values in zip(first["completions"], first["log_probabilities"], strict=True):
            assert values == pytest.approx(expected(policy, version, answer), abs=1e-5)
        drawn.append(first["completions"])
    assert drawn[1] == drawn[2] != drawn[3]
    # The weights are read once for each version.
    loads = [path for path in stub.asked if path in ("/collective_rpc", "/update_weights_from_disk")]
    assert len(loads) == 3
    with pytest.raises(FileNotFoundError):
        generator.answer(0, 9, PROMPTS)


def test_a_server_that_was_started_again_reads_the_weights_again(make, stub, policy):
    generator = make()
    generator.answer(0, 1, PROMPTS)
    stub.engine.load(policy / "0-0")
    stub.engine.empty_cache()
    stub.version = "default"
    [answer, *_], [values, *_] = (generator.answer(0, 1, PROMPTS)[0][of] for of in ("completions", "log_probabilities"))
    assert values == pytest.approx(expected(policy, 1, answer), abs=1e-5)

    def restart(path, answer):
        if path in ("/v1/completions", "/generate"):
            stub.version = "default"
        return answer

    stub.spoils = restart
    with pytest.raises(NotAMessageError, match="was it started again"):
        generator.answer(0, 1, PROMPTS)


def spoil_answers(change):
    def spoils(path, answer):
        if path not in ("/v1/completions", "/generate"):
            return answer
        of_vllm = path == "/v1/completions"
        one = (answer["choices"] if of_vllm else answer)[0]
        change(one if of_vllm else one["meta_info"], of_vllm)
        return answer

    return spoils


def put(place, token=None, value=None):
    """Changes a token, or its log-probability, of an answer."""

    def change(one, of_vllm):
        if of_vllm:
            tokens, values = one["token_ids"], one["logprobs"]["token_logprobs"]
            tokens[place] = tokens[place] if token is None else token
            values[place] = values[place] if value is None else value
        else:
            pair = one["output_token_logprobs"][place]
            pair[0], pair[1] = pair[0] if value is None else value, pair[1] if token is None else token

    return spoil_answers(change)


def drop(of_tokens):
    """Drops the last log-probability, or the last token too."""

    def change(one, of_vllm):
        if of_vllm:
            one["logprobs"]["token_logprobs"].pop()
            if of_tokens:
                one["token_ids"].pop()
        elif of_tokens:
            one["output_token_logprobs"].pop()
        else:
            one["output_token_logprobs"][-1] = []

    return spoil_answers(change)


def other_prompt(one, of_vllm):
    one["prompt_token_ids" if of_vllm else "prompt_tokens"] = [0, 3, 4] if of_vllm else 3


def refuse(status):
    def spoils(path, answer):
        if path in ("/v1/completions", "/generate"):
            raise Refused(status, f"no, {SECRET}\n\x1b[31m" + "x" * 1000)
        return answer

    return spoils


@pytest.mark.parametrize(
    ("spoils", "error", "match"),
    [
        (put(0, token=12), NotAMessageError, "no tokens of the model"),
        (put(0, value=float("nan")), NotAMessageError, "no finite log-probability"),
        (put(0, value=0.5), NotAMessageError, "above 0"),
        (put(-2, token=1), NotAMessageError, "goes on after one"),
        (drop(of_tokens=False), NotAMessageError, "log-probability"),
        (drop(of_tokens=True), NotAMessageError, "ends without an end token"),
        (spoil_answers(other_prompt), NotAMessageError, "another prompt"),
        (lambda path, answer: b"[" * 100_000, NotAMessageError, "RecursionError|deeper"),
        (lambda path, answer: b"\xff\xfe", NotAMessageError, "not a message"),
        (lambda path, answer: b" " * 2**23, NotAMessageError, "longer than"),
        (refuse(503), StatusError, r"HTTP 503: no, \*\*\*"),
        (refuse(302), StatusError, "HTTP 302"),
    ],
)
def test_nonsense_is_refused(make, stub, spoils, error, match):
    generator = make()
    generator.answer(0, 0, PROMPTS)
    stub.spoils = spoils
    with pytest.raises(error, match=match) as caught:
        for seed in range(20):
            generator.answer(0, 0, [{"number": 0, "tokens": [3, 4], "seeds": [seed, seed + 1, seed + 2]}])
    made = failure(stub.address, caught.value)
    assert isinstance(made, PeerError)
    assert SECRET not in str(made)
    assert "\x1b" not in str(made)


def test_weights_of_another_model_are_refused_and_none_of_its_answers_count(make, stub):
    generator = make()
    with pytest.raises(StatusError, match="size mismatch"):
        generator.answer(0, 3, PROMPTS)
    assert "start-0-3" not in stub.version


def test_a_server_that_hangs_costs_its_time_and_no_more(make, stub):
    make()
    quick = open_server(config_of(stub, "task.answer_seconds=0.2"), stub.address, LIMITS)
    released, begin = threading.Event(), time.monotonic()
    stub.spoils = lambda path, answer: released.wait(120) and answer
    try:
        with pytest.raises(NoAnswerError, match=r"no whole answer in 0\.2 s"):
            quick.complete([3, 4], [1, 2, 3])
        assert time.monotonic() - begin < 60
    finally:
        released.set()


def test_a_server_is_waited_for_while_the_one_in_front_of_it_says_that_it_is_not_there(make, stub, monkeypatch):
    make()
    monkeypatch.setattr("hfdist.tune.generators.servers.served._RETRY_SECONDS", 0.01)
    server = open_server(config_of(stub), stub.address, LIMITS)
    said = [502, 503, 504]

    def spoils(path, answer):
        if said:
            raise Refused(said.pop(), "Bad Gateway")
        return answer

    stub.spoils = spoils
    wait_until_ready(server, 60)
    assert not said
    said = [502] * 1000
    with pytest.raises(StatusError, match="HTTP 502"):
        wait_until_ready(server, 0)
    said = [500]
    with pytest.raises(StatusError, match="HTTP 500"):
        wait_until_ready(server, 60)


def test_an_answer_without_a_length_is_not_whole_when_its_time_is_over():
    """The end of the connection is the end of such an answer, and the client ends it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def begin_to_answer():
            connection, _ = listening.accept()
            with connection:
                connection.recv(2**16)
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                # Spaces, which keep a socket's own timeout away, until the client has had enough.
                with suppress(OSError):
                    while True:
                        connection.sendall(b" ")
                        time.sleep(0.02)

        answering = threading.Thread(target=begin_to_answer)
        answering.start()
        client = JsonClient(f"http://127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(NoAnswerError, match=r"no whole answer in 0\.3 s"):
            client.post("/resume", {}, seconds=0.3)
        answering.join(60)
        assert not answering.is_alive()


def test_what_cannot_serve_is_refused_before_the_training(stub, policy, monkeypatch):
    def found(*overrides):
        with pytest.raises(ConfigError) as caught:
            ask_servers(config_of(stub, *overrides))
        assert SECRET not in str(caught.value)
        return caught.value

    monkeypatch.setenv("HFDIST_SERVER_KEY", SECRET)
    ask_servers(config_of(stub))
    if stub.name == "vllm":
        assert "--logprobs-mode processed_logprobs" in found("task.temperature=0.7").hint
        route = stub.route
        stub.route = lambda path, body: route(path, body) if path == "/v1/models" else _missing()
        assert "VLLM_SERVER_DEV_MODE" in found().hint
        stub.route = route
    monkeypatch.setenv("HFDIST_SERVER_KEY", f"{SECRET}!")
    refused = found()
    assert "HTTP 401" in refused.found
    assert "export HFDIST_SERVER_KEY=" in refused.hint
    for key in (f"{SECRET}\nHost: other", f"{SECRET}\u00e9"):
        monkeypatch.setenv("HFDIST_SERVER_KEY", key)
        assert found().where == "task.server_key_variable"
    monkeypatch.delenv("HFDIST_SERVER_KEY")
    assert found().where == "task.server_key_variable"
    monkeypatch.setenv("HFDIST_SERVER_KEY", SECRET)
    with pytest.raises(ConfigError, match="fewer tokens"):
        open_server(config_of(stub, "data.sequence_length=64"), stub.address, LIMITS).check()
    stub.close()
    gone = found()
    assert "ConnectionRefusedError" in gone.found
    assert "start the server first" in gone.hint


def _missing():
    raise Refused(404, '{"detail": "Not Found"}')
