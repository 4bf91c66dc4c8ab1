"""Uploads: files arrive byte by byte, also through a Hub that fails; whether that will do is known beforehand."""

import pytest

from hfdist.config.run import ExportConfig
from hfdist.errors import ConfigError, ResourceError
from hfdist.run.export.push_to_hub import check_push, push
from tests.hub_server import Cut, Status, User, write_model

NAME, TOKEN = "me/tuned", "hf_SECRETsecretSECRET"
EXPORT = ExportConfig(push_to=NAME)


@pytest.fixture
def me(hub, monkeypatch):
    hub.store.users[TOKEN] = User("me")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("run") / "model", max_shard_size="40KB")
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n# run\n")
    return folder


def assert_it_arrived(hub, folder, revision="main"):
    there = {name: c for name, c in hub.store.repositories["models", NAME].files(revision).items()
             if name != ".gitattributes"}  # fmt: skip
    assert there == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_arrive_and_are_sent_once(me, exported):
    check_push(EXPORT)
    assert push(exported, EXPORT) is None
    repository = me.store.repositories["models", NAME]
    assert repository.private
    assert repository.messages[-1].startswith("Upload model of run")
    assert_it_arrived(me, exported)
    sent = len(me.asked("PUT"))
    assert push(exported, EXPORT) is None
    assert len(me.asked("PUT")) == sent
    assert len(repository.commits) == 2, "nothing new is no commit"
    assert all("authorization" not in headers for line, headers in me.requests if line.startswith("PUT"))


def test_to_a_branch_of_a_public_repository(me, exported):
    export = ExportConfig(push_to=NAME, private=False, revision="second")
    check_push(export)
    check_push(export)
    assert push(exported, export) is None
    assert not me.store.repositories["models", NAME].private
    assert_it_arrived(me, exported, "second")
    assert "README.md" not in me.store.repositories["models", NAME].files("main")


@pytest.mark.parametrize(
    ("question", "fault", "times"),
    [
        ("^PUT", Cut(5000), 1),
        ("^PUT", Status(500), 1),
        ("^POST .*(preupload|batch|verify)", Status(502), 1),
        ("^POST .*/commit/", Status(503), 2),
        ("^POST .*/commit/", Cut(10), 1),
        ("^POST .*/commit/", Status(429, {"Retry-After": "0"}), 2),
    ],
)
def test_a_failing_hub_is_asked_again(me, exported, question, fault, times):
    check_push(EXPORT)
    me.faults.plan(question, fault, times)
    assert push(exported, EXPORT) is None
    assert_it_arrived(me, exported)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Status(503), "the Hub fails (HTTP 503)"),
        (Status(429, {"Retry-After": "3600"}), "wants a wait of 3600 s"),
        (Status(403), "refuses access with this token"),
    ],
)
def test_an_upload_that_fails_says_how_to_do_it_later(me, exported, fault, words):
    export = ExportConfig(push_to=NAME, revision="v1")
    check_push(export)
    me.faults.plan("^POST .*/commit/", fault, 99)
    failure = push(exported, export)
    assert isinstance(failure, ResourceError)
    assert failure.exit_code == 7
    text = str(failure)
    assert words in text
    assert f"hf upload {NAME} {exported} . --revision v1" in text
    assert TOKEN not in text


class TestBeforeTheTraining:
    def refused(self, kind=ConfigError, export=EXPORT):
        with pytest.raises(kind) as caught:
            check_push(export)
        assert caught.value.where == "export.push_to"
        assert TOKEN not in str(caught.value)
        return str(caught.value)

    def test_no_token(self, hub):
        assert "needs a token, and none is given" in self.refused()

    def test_a_token_that_is_none(self, me):
        me.store.users.clear()
        assert "does not accept the token" in self.refused()

    def test_a_token_that_may_only_read(self, me):
        me.store.users[TOKEN] = User("me", may_write=False)
        assert "the Hub refuses access with this token" in self.refused()
        me.store.add(NAME, {"README.md": b""})
        assert "the Hub refuses access with this token" in self.refused()

    def test_someone_elses_repository(self, me):
        me.store.add("other/model", {"README.md": b""})
        assert "the Hub refuses access" in self.refused(export=ExportConfig(push_to="other/model"))

    def test_a_hub_that_fails(self, me):
        me.faults.plan("whoami", Status(503), 99)
        assert "the Hub fails (HTTP 503)" in self.refused(ResourceError)

    def test_nothing_is_asked_without_an_upload(self, hub):
        check_push(ExportConfig())
        assert not hub.requests
