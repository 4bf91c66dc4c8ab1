"""Models of a Hub repository: what comes, once, whole, of one commit; and one message where it does not come."""

import io
import logging
import threading
import time
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import constants, get_session
from huggingface_hub.utils import hf_raise_for_status
from transformers import AutoModelForCausalLM

from hfdist.errors import ConfigError, HfdistError, ResourceError
from hfdist.models import hub_client
from hfdist.models.hub_client import ask_hub
from hfdist.models.resolve import resolve_model
from hfdist.run.logs import set_up_logging
from hfdist.testing import run_ranks
from hfdist.topology import Topology
from tests.hub_server import BadBytes, Cut, Slow, Status, User
from tests.unit.hub.starting import assert_same_weights, begin, configure

NAME = "some/model"
INDEX = "model.safetensors.index.json"
TOKEN = "hf_SECRETsecretSECRET"


@pytest.fixture
def served(hub, model_folder):
    hub.store.add(NAME, model_folder)
    return hub


@pytest.fixture
def fetch(tmp_path):
    def fetch(name=NAME, revision=None, **more):
        start = resolve_model(configure(name, revision, **more), cache_dir=tmp_path)
        start.fetch_weights()
        return start.model

    return fetch


def test_threads_that_ask_at_once_leave_the_client_as_it_was(hub):
    session = get_session()
    hooks, timeout = session.event_hooks, session.timeout
    begun = threading.Event()

    def take_long():
        begun.set()
        time.sleep(0.2)

    first = threading.Thread(target=ask_hub, args=(take_long,), kwargs={"key": "model.name", "name": NAME})
    first.start()
    begun.wait()
    # Begins while the first asks, and ends after it.
    second = threading.Thread(target=ask_hub, args=(first.join,), kwargs={"key": "model.name", "name": NAME})
    second.start()
    for thread in (first, second):
        thread.join()
    assert (session.event_hooks, session.timeout) == (hooks, timeout)


@pytest.mark.parametrize("folder", ["model_folder", "sharded_folder"])
def test_a_model_comes_once(hub, tmp_path, folder, request):
    folder = request.getfixturevalue(folder)
    hub.store.add(NAME, folder)
    hub.store.repositories["models", NAME].commit({"pytorch_model.bin": b"a pickle", "run.py": b"exit()"})
    model, tokenizer = begin(NAME, tmp_path / "cache")
    assert_same_weights(model, AutoModelForCausalLM.from_pretrained(folder))
    assert tokenizer("def add")["input_ids"]
    files = hub.asked("GET /storage")
    assert len(files) == len(set(files)) == len(list(folder.glob("*.safetensors")))
    assert not [line for line, _ in hub.requests if ".bin" in line or ".py" in line]

    hub.requests.clear()
    begin(NAME, tmp_path / "cache")
    assert [line for line, _ in hub.requests] == [f"GET /api/models/{NAME}"], "what is here is not asked for"


def test_config_tokenizer_and_weights_are_of_one_commit(hub, tmp_path, model_folder):
    repository = hub.store.add(NAME, model_folder)
    first = repository.branches["main"]
    start = resolve_model(configure(NAME), cache_dir=tmp_path)
    repository.commit({"model.safetensors": b"of another run", "config.json": b"{}"})
    start.fetch_weights()
    assert start.model.name.endswith(first)
    assert not hub.asked(f"GET /{NAME}/resolve/{repository.branches['main']}")


def test_branches_tags_and_commits(served, tmp_path):
    repository = served.store.repositories["models", NAME]
    commit = repository.commit({}, branch="second")
    repository.commits[commit] = repository.commits.pop(repository.branches.pop("main"))
    for revision in ("second", commit):
        assert begin(NAME, tmp_path, revision=revision)


def test_ranks_of_a_machine_fetch_each_file_once(hub, fetch, sharded_folder):
    hub.store.add(NAME, sharded_folder)
    hub.faults.plan("^GET /storage", Slow(0.2), times=3)
    run_ranks(lambda: fetch() and None, 2, group=False)
    files = [*hub.asked("GET /storage"), *hub.asked(f"GET /{NAME}/resolve/")]
    assert len(files) == len(set(files)) >= 6


def test_a_token_goes_to_the_hub_alone(hub, tmp_path, model_folder, monkeypatch):
    hub.store.add(NAME, model_folder, private=True)
    hub.store.users[TOKEN] = User("some")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    begin(NAME, tmp_path)
    # Once a day huggingface_hub fetches a public list, too.
    for line, headers in (one for one in hub.requests if "/api/agent-harnesses" not in one[0]):
        assert ("authorization" in headers) == ("/storage/" not in line), line


def test_signed_addresses_are_not_logged(served, tmp_path):
    served.faults.plan("GET /storage", Cut(5000))

    def rank():
        set_up_logging(Topology())
        (handler,) = logging.getLogger("huggingface_hub").handlers
        handler.stream = io.StringIO()
        begin(NAME, tmp_path)
        return handler.stream.getvalue()

    (text,) = run_ranks(rank, 1, group=False)
    assert "Error while downloading from http://localhost" in text
    assert "Signature" not in text


def refusal(fetch, *name, kind=ConfigError, **more):
    """One message: the key, the repository, the next move."""
    with pytest.raises(kind) as caught:
        fetch(*name, **more)
    error, text = caught.value, str(caught.value)
    assert type(error) is kind
    assert error.where.startswith("model.")
    assert error.hint or error.allowed
    assert TOKEN not in text
    assert "secret-of-the-storage" not in text
    return text


def test_missing_or_private(hub, fetch, model_folder, monkeypatch):
    assert "no such repository, or it is private" in refusal(fetch)
    hub.store.add(NAME, model_folder, private=True)
    assert "hf auth login" in refusal(fetch)
    hub.store.users[TOKEN] = User("another")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "no such repository, or it is private" in refusal(fetch)


def test_no_token_is_none_that_the_hub_refuses(monkeypatch):
    """So it answers without a token for what is missing or private."""
    monkeypatch.setattr(hub_client, "get_token", lambda: None)
    address = "https://huggingface.co/api/models/nobody/nothing"
    answer = httpx2.Response(
        401, headers={"X-Error-Message": "Invalid username or password."}, request=httpx2.Request("GET", address)
    )
    with pytest.raises(HfdistError, match="no such repository, or it is private"):
        hub_client.ask_hub(lambda: hf_raise_for_status(answer), key="model.name", name="nobody/nothing")


def test_gated(hub, fetch, model_folder, monkeypatch):
    repository = hub.store.add(NAME, model_folder, gated=True)
    assert "gated, and no token is given" in refusal(fetch)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "does not accept the token" in refusal(fetch)
    hub.store.users[TOKEN] = User("another")
    text = refusal(fetch)
    assert "your account has not been granted access" in text
    assert "ask for access on its page" in text
    repository.gated = False
    assert fetch()


@pytest.mark.parametrize(
    ("files", "more", "words"),
    [
        ({"README.md": b""}, {}, "holds no model: there is no config.json"),
        ({"README.md": b""}, {"revision": "v9"}, "no such revision"),
        ({"model.safetensors": b"x"}, {}, "has no config.json"),
        ({"config.json": b"{}"}, {}, "holds no weights"),
        ({"config.json": b"{}", "pytorch_model.bin": b""}, {}, "can run code when they are opened"),
        ({"config.json": b"{}", "m.gguf": b""}, {}, "model.gguf_file=m.gguf"),
        ({"m.Q4.gguf": b"", "m.Q8.gguf": b""}, {"gguf_file": "x.gguf"}, "m.Q4.gguf, m.Q8.gguf"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, {}, "adapter, not a model"),
        ({"config.json": b"{}", INDEX: b'{"weight_map": {"a": "1", "b": "2"}}'}, {}, "2 of 2"),
        ({"config.json": b"{}", INDEX: b'{"weight_map": {"a": "../1"}}'}, {}, "is damaged"),
        ({"config.json": b"{}", INDEX: b"[]"}, {}, "is damaged"),
    ],
)
def test_repositories_that_hold_no_model(hub, fetch, files, more, words):
    hub.store.add(NAME, files)
    assert words in refusal(fetch, **more)


def test_code_of_its_own(hub, fetch):
    config = b'{"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}'
    hub.store.add(NAME, {"config.json": config, "modeling.py": b"raise SystemExit", "model.safetensors": b""})
    text = refusal(fetch)
    assert "Python code of its own, which is not run" in text
    assert "model.trust_remote_code=true" in text
    assert not [line for line, _ in hub.requests if line.endswith(".py")], "it does not even come"
    assert (Path(fetch(trust_remote_code=True).name) / "modeling.py").is_file()


@pytest.mark.parametrize("name", ["a/b/c", "https://user:pass@host/x", "name with spaces"])
def test_names_that_are_none(hub, fetch, name):
    text = refusal(fetch, name)
    assert "neither a Hub id" in text
    assert "user:pass" not in text


@pytest.mark.parametrize(
    ("question", "fault", "times"),
    [
        ("GET /api/models", Status(503), 2),
        ("HEAD .*config.json", Status(503), 2),
        ("GET /storage", Status(503), 2),
        ("GET /(api|storage)", Status(429, {"Retry-After": "0"}), 2),
        ("GET (/storage|.*/tokenizer.json)", BadBytes(), 2),
    ],
)
def test_a_failing_hub_is_asked_again(served, tmp_path, model_folder, question, fault, times):
    served.faults.plan(question, fault, times)
    model, _ = begin(NAME, tmp_path)
    assert_same_weights(model, AutoModelForCausalLM.from_pretrained(model_folder))


A_LONG_WAIT = Status(429, {"Retry-After": "3600"})


@pytest.mark.parametrize(
    ("question", "fault", "words"),
    [
        ("GET /storage", Status(500), "the Hub fails (HTTP 500)"),
        ("GET /api/models", Cut(5), "the connection to the Hub breaks off"),
        ("GET /storage", BadBytes(), "model.safetensors does not have the hash that the Hub says"),
        *((question, A_LONG_WAIT, "a wait of 3600 s") for question in ("GET /api/models", "HEAD", "GET /storage")),
    ],
)
def test_a_hub_that_fails_for_long_is_said(served, fetch, question, fault, words):
    served.faults.plan(question, fault, times=99)
    assert words in refusal(fetch, kind=ResourceError)
    if fault is A_LONG_WAIT:
        assert len(served.asked(question)) <= 4, "the four files are asked for at once, and none a second time"


def test_a_cut_download_goes_on_where_it_was(served, fetch, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # else what has come is written every 10 MB
    served.faults.plan("GET /storage", Cut(10_000))
    assert fetch()
    first, second = [headers for line, headers in served.requests if line.startswith("GET /storage")]
    assert "range" not in first
    assert second["range"] == "bytes=10000-"


def test_a_cached_file_that_has_gone_bad_is_fetched_again(served, tmp_path, model_folder):
    begin(NAME, tmp_path)
    (blob,) = [path.resolve() for path in tmp_path.rglob("snapshots/*/model.safetensors")]
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    model, _ = begin(NAME, tmp_path)
    assert_same_weights(model, AutoModelForCausalLM.from_pretrained(model_folder))


def test_no_hub_there(hub, fetch, monkeypatch):
    for address in ("http://127.0.0.1:1", "http://no-such-host.invalid"):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        text = refusal(fetch, kind=ResourceError)
        assert f"the Hub cannot be reached at {address}" in text
        assert "hf download" in text


def test_without_the_hub_the_cache_will_do(served, fetch, caplog):
    fetch()
    served.faults.plan("GET /api", Status(503), times=99)
    assert fetch()
    assert "going on with the copy in the local cache" in caplog.text


def test_a_full_disk(served, tmp_path, fetch):
    blobs = tmp_path / "hf-home" / "hub" / "models--some--model" / "blobs"
    blobs.mkdir(parents=True)
    run_ranks(_fill_and_fetch, 1, blobs, fetch, group=False)


def _fill_and_fetch(blobs, fetch):
    """On a disk of this process's own, too small for the weights."""
    from tests.distributed.disk_faults import _leave_mounts, _mount

    try:
        _leave_mounts()
        _mount("-t", "tmpfs", "-o", "size=40k", "small", blobs)
    except PermissionError:
        pytest.skip("mounts of its own are not allowed")
    text = refusal(fetch, kind=ResourceError)
    assert "no space is left on the disk for the download" in text
    assert "HF_HOME" in text


def test_offline(hub, tmp_path, fetch, sharded_folder, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    words = "switched off, and the files are not all in the local cache"
    text = refusal(fetch)
    assert words in text
    assert "hf download" in text
    hub.store.add(NAME, sharded_folder)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    resolve_model(configure(NAME), cache_dir=tmp_path)
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert words in refusal(fetch), "without the weights"
    assert not hub.requests
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    fetch()
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model, _ = begin(NAME, tmp_path)
    assert_same_weights(model, AutoModelForCausalLM.from_pretrained(sharded_folder))
    assert not hub.requests
