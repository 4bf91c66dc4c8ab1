"""Models of a Hub repository: what comes, once, whole, of one commit; and one message where it does not come."""

import io
import logging
import socket
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from hfdist.errors import ConfigError, ResourceError
from hfdist.models.resolve import resolve_model
from hfdist.testing import run_ranks
from hfdist.topology import Topology
from hfdist.trainer.reporting.logs import set_up_logging
from tests.hub_server import BadBytes, Cut, Slow, Status, User
from tests.unit.hub.starting import assert_same_weights, begin, configure

NAME = "some/model"
TOKEN = "hf_SECRETsecretSECRET"


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


def test_branches_tags_and_commits(hub, tmp_path, model_folder):
    repository = hub.store.add(NAME, {"README.md": b""})
    files = {path.name: path.read_bytes() for path in model_folder.iterdir()}
    hub.store.add("other/copy", files)  # puts the large ones into the storage
    commit = repository.commit(files, branch="second")
    for revision in ("second", commit):
        assert begin(NAME, tmp_path, revision=revision)


def test_ranks_of_a_machine_fetch_each_file_once(hub, tmp_path, sharded_folder):
    hub.store.add(NAME, sharded_folder)
    hub.faults.plan("^GET /storage", Slow(0.2), times=3)

    def rank():
        resolve_model(configure(NAME), cache_dir=tmp_path).fetch_weights()

    run_ranks(rank, 2, group=False)
    files = [
        line for line, _ in hub.requests if line.startswith("GET") and ("/storage/" in line or "/resolve/" in line)
    ]
    assert len(files) == len(set(files)) >= 6


def test_a_token_goes_to_the_hub_alone(hub, tmp_path, model_folder, monkeypatch):
    hub.store.add(NAME, model_folder, private=True)
    hub.store.users[TOKEN] = User("some")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    begin(NAME, tmp_path)
    for line, headers in hub.requests:
        assert ("authorization" in headers) == ("/storage/" not in line), line


def test_signed_addresses_are_not_logged(hub, tmp_path, model_folder):
    hub.store.add(NAME, model_folder)
    hub.faults.plan("GET /storage", Cut(5000))

    def rank():
        set_up_logging(Topology())
        (handler,) = logging.getLogger("huggingface_hub").handlers
        handler.stream = io.StringIO()
        begin(NAME, tmp_path)
        return handler.stream.getvalue()

    (text,) = run_ranks(rank, 1, group=False)
    assert "Error while downloading from http://localhost" in text
    assert "Signature" not in text


class TestWhatIsWrong:
    """One message: the key, the repository, the next move; nothing is tried again."""

    def refused(self, name=NAME, revision=None, cache=None, kind=ConfigError, **more):
        with pytest.raises(kind) as caught:
            resolve_model(configure(name, revision, **more), cache_dir=cache).fetch_weights()
        error = caught.value
        assert type(error) is kind
        assert error.where.startswith("model.")
        assert error.hint or error.allowed
        text = str(error)
        assert TOKEN not in text
        assert "secret-of-the-storage" not in text
        return text

    def test_missing_or_private(self, hub, tmp_path, model_folder, monkeypatch):
        assert "no such repository, or it is private" in self.refused(cache=tmp_path)
        hub.store.add(NAME, model_folder, private=True)
        assert "hf auth login" in self.refused(cache=tmp_path)
        hub.store.users[TOKEN] = User("another")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert "no such repository, or it is private" in self.refused(cache=tmp_path)

    def test_gated(self, hub, tmp_path, model_folder, monkeypatch):
        repository = hub.store.add(NAME, model_folder, gated=True)
        assert "gated, and no token is given" in self.refused(cache=tmp_path)
        hub.store.users[TOKEN] = User("another")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        text = self.refused(cache=tmp_path)
        assert "your account has not been granted access" in text
        assert "ask for access on its page" in text
        repository.readers.add("another")
        assert begin(NAME, tmp_path)

    def test_a_token_that_is_none(self, hub, tmp_path, model_folder, monkeypatch):
        hub.store.add(NAME, model_folder)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert "does not accept the token" in self.refused(cache=tmp_path)

    def test_revision(self, hub, tmp_path, model_folder):
        hub.store.add(NAME, model_folder)
        assert "no such revision" in self.refused(revision="v9", cache=tmp_path)

    @pytest.mark.parametrize(
        ("files", "words"),
        [
            ({"README.md": b""}, "holds no weights"),
            ({"model.safetensors": b"x"}, "has no config.json"),
            ({"config.json": b"{}"}, "holds no weights"),
            ({"config.json": b"{}", "pytorch_model.bin": b""}, "can run code when they are opened"),
            ({"config.json": b"{}", "m.gguf": b""}, "model.gguf_file=m.gguf"),
            ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, "adapter, not a model"),
            ({"config.json": b"{}", "model.safetensors.index.json": b'{"weight_map": {"a": "1", "b": "2"}}'}, "2 of 2"),
            ({"config.json": b"{}", "model.safetensors.index.json": b'{"weight_map": {"a": "../1"}}'}, "is damaged"),
            ({"config.json": b"{}", "model.safetensors.index.json": b"[]"}, "is damaged"),
        ],
    )
    def test_repositories_that_hold_no_model(self, hub, tmp_path, files, words):
        hub.store.add(NAME, files)
        assert words in self.refused(cache=tmp_path)

    def test_code_of_its_own(self, hub, tmp_path):
        config = b'{"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}'
        hub.store.add(NAME, {"config.json": config, "modeling.py": b"raise SystemExit", "model.safetensors": b""})
        text = self.refused(cache=tmp_path)
        assert "Python code of its own, which is not run" in text
        assert "model.trust_remote_code=true" in text
        assert not [line for line, _ in hub.requests if line.endswith(".py")], "it does not even come"
        start = resolve_model(configure(NAME, trust_remote_code=True), cache_dir=tmp_path)
        assert (Path(start.model.name) / "modeling.py").is_file()

    @pytest.mark.parametrize("name", ["a/b/c", "https://user:pass@host/x", "name with spaces"])
    def test_names_that_are_none(self, hub, tmp_path, name):
        text = self.refused(name, cache=tmp_path)
        assert "neither a Hub id" in text
        assert "user:pass" not in text

    def test_a_gguf_file_that_is_not_there(self, hub, tmp_path):
        hub.store.add(NAME, {"m.Q4.gguf": b"", "m.Q8.gguf": b""})
        text = self.refused(cache=tmp_path, gguf_file="x.gguf")
        assert "m.Q4.gguf, m.Q8.gguf" in text


class TestWhatMayPass:
    def fails(self, cache):
        with pytest.raises(ResourceError) as caught:
            resolve_model(configure(NAME), cache_dir=cache).fetch_weights()
        assert caught.value.exit_code == 7
        assert caught.value.where == "model.name"
        assert "secret-of-the-storage" not in str(caught.value)
        return str(caught.value)

    @pytest.mark.parametrize("question", ["GET /api/models", "HEAD .*config.json", "GET /storage"])
    def test_a_failing_hub_is_asked_again(self, hub, tmp_path, model_folder, question):
        hub.store.add(NAME, model_folder)
        hub.faults.plan(question, Status(503), times=2)
        assert begin(NAME, tmp_path)

    def test_a_hub_that_fails_for_long(self, hub, tmp_path, model_folder):
        hub.store.add(NAME, model_folder)
        hub.faults.plan("GET /storage", Status(500), times=99)
        assert "the Hub fails (HTTP 500)" in self.fails(tmp_path)

    def test_too_many_requests_are_repeated_when_the_hub_says(self, hub, tmp_path, model_folder):
        hub.store.add(NAME, model_folder)
        hub.faults.plan("GET /(api|storage)", Status(429, {"Retry-After": "0"}), times=2)
        assert begin(NAME, tmp_path)

    @pytest.mark.parametrize("question", ["GET /api/models", "HEAD", "GET /storage"])
    def test_a_long_wait_is_said_instead(self, hub, tmp_path, model_folder, question):
        hub.store.add(NAME, model_folder)
        hub.faults.plan(question, Status(429, {"Retry-After": "3600"}), times=99)
        text = self.fails(tmp_path)
        assert "a wait of 3600 s" in text
        assert len(hub.asked(question)) <= 4, "the four files are asked for at once, and none a second time"

    def test_a_cut_download_goes_on_where_it_was(self, hub, tmp_path, model_folder, monkeypatch):
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # else what has come is written every 10 MB
        hub.store.add(NAME, model_folder)
        hub.faults.plan("GET /storage", Cut(10_000))
        assert begin(NAME, tmp_path)
        first, second = [headers for line, headers in hub.requests if line.startswith("GET /storage")]
        assert "range" not in first
        assert second["range"] == "bytes=10000-"

    def test_a_connection_that_is_cut_again_and_again(self, hub, tmp_path, model_folder):
        hub.store.add(NAME, model_folder)
        hub.faults.plan("GET /api/models", Cut(5), times=99)
        assert "the connection to the Hub breaks off" in self.fails(tmp_path)

    def test_damaged_content_is_fetched_again(self, hub, tmp_path, model_folder):
        hub.store.add(NAME, model_folder)
        hub.faults.plan("GET /storage", BadBytes())
        hub.faults.plan("GET .*/tokenizer.json", BadBytes())
        model, _ = begin(NAME, tmp_path)
        assert_same_weights(model, AutoModelForCausalLM.from_pretrained(model_folder))
        assert len(hub.asked("GET /storage")) == 2

    def test_content_that_stays_damaged(self, hub, tmp_path, model_folder):
        hub.store.add(NAME, model_folder)
        hub.faults.plan("GET /storage", BadBytes(), times=99)
        assert "model.safetensors does not have the hash that the Hub says" in self.fails(tmp_path)

    def test_a_cached_file_that_has_gone_bad_is_fetched_again(self, hub, tmp_path, model_folder):
        hub.store.add(NAME, model_folder)
        begin(NAME, tmp_path)
        (blob,) = [path.resolve() for path in tmp_path.rglob("snapshots/*/model.safetensors")]
        content = bytearray(blob.read_bytes())
        content[-1] ^= 1
        blob.write_bytes(content)
        model, _ = begin(NAME, tmp_path)
        assert_same_weights(model, AutoModelForCausalLM.from_pretrained(model_folder))

    def test_no_hub_there(self, hub, tmp_path, model_folder, monkeypatch):
        hub.store.add(NAME, model_folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
            text = self.fails(tmp_path)
        assert "the Hub cannot be reached at http://127.0.0.1" in text
        assert "hf download" in text
        monkeypatch.setattr(constants, "ENDPOINT", "http://no-such-host.invalid")
        assert "cannot be reached at http://no-such-host.invalid" in self.fails(tmp_path)

    def test_without_the_hub_the_cache_will_do(self, hub, tmp_path, model_folder, monkeypatch, caplog):
        hub.store.add(NAME, model_folder)
        begin(NAME, tmp_path)
        hub.faults.plan("GET /api", Status(503), times=99)
        assert begin(NAME, tmp_path)
        assert "going on with the copy in the local cache" in caplog.text

    def test_a_full_disk(self, hub, tmp_path, model_folder, monkeypatch):
        hub.store.add(NAME, model_folder)
        blobs = tmp_path / "hf-home" / "hub" / "models--some--model" / "blobs"
        blobs.mkdir(parents=True)
        run_ranks(_fill_and_begin, 1, blobs, tmp_path, group=False)


def _fill_and_begin(blobs, cache):
    """On a disk of this process's own, too small for the weights."""
    from tests.distributed.small_disk import _leave_mounts, _mount

    try:
        _leave_mounts()
        _mount("-t", "tmpfs", "-o", "size=40k", "small", blobs)
    except PermissionError:
        pytest.skip("mounts of its own are not allowed")
    with pytest.raises(ResourceError) as caught:
        begin(NAME, cache)
    assert "no space is left on the disk for the download" in str(caught.value)
    assert "HF_HOME" in str(caught.value)


class TestOffline:
    @pytest.fixture
    def offline(self, hub, monkeypatch):
        def switch():
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
            hub.requests.clear()

        return switch

    def test_from_the_cache(self, hub, tmp_path, sharded_folder, offline):
        hub.store.add(NAME, sharded_folder)
        begin(NAME, tmp_path)
        offline()
        model, _ = begin(NAME, tmp_path)
        assert_same_weights(model, AutoModelForCausalLM.from_pretrained(sharded_folder))
        assert not hub.requests

    def test_nothing_is_cached(self, hub, tmp_path, offline):
        offline()
        with pytest.raises(ConfigError, match="switched off, and the files are not all in the local cache") as caught:
            begin(NAME, tmp_path)
        assert "hf download" in caught.value.hint

    def test_half_of_it_is_cached(self, hub, tmp_path, sharded_folder, offline):
        hub.store.add(NAME, sharded_folder)
        resolve_model(configure(NAME), cache_dir=tmp_path)
        offline()
        with pytest.raises(ConfigError, match="switched off, and the files are not all in the local cache"):
            begin(NAME, tmp_path)
        assert not hub.requests
