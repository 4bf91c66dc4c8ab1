"""Folders that a run cannot use, found before anything large is imported."""

import os

import pytest

from hfdist.config.checks.preflight import check_run
from hfdist.config.composition.compose import compose_config
from hfdist.errors import ConfigError


@pytest.mark.parametrize(
    ("folder", "what"),
    [
        ("/proc/x", "cannot be used"),  # where root may write by its permissions
        ("file/x", "a file is in the folder's place"),
        ("link", "a file is in the folder's place"),
    ],
)
def test_a_run_folder_that_cannot_be_made(folder, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=what) as caught:
        check_run(compose_config(["model=tiny", f"run.dir={folder}"]))
    assert caught.value.where == "run.dir"


@pytest.mark.parametrize("folder", ["new/and/deeper", "there"])
def test_looking_leaves_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    check_run(compose_config(["model=tiny", f"run.dir={folder}"]))
    assert [found.name for found in tmp_path.rglob("*")] == ["there"]


@pytest.mark.parametrize("key", ["model.name", "data.sources.files.path"])
@pytest.mark.parametrize("path", ["~no_such_user/x", "{tmp_path}/shut/x"])
def test_a_place_into_which_nobody_may_look_is_one_message(key, path, tmp_path, monkeypatch):
    path = path.format(tmp_path=tmp_path)
    files = "data.sources.files.path=texts"
    config = compose_config(["model=hub", "model.name=a/b", "data=files", files, f"{key}='{path}'"])
    if "shut" in path:
        # As it is for those who are not root.
        (tmp_path / "shut").mkdir(mode=0)
        stat = os.stat

        def refuse(name, **options):
            if str(name).endswith("shut/x"):
                raise PermissionError(13, "Permission denied")
            return stat(name, **options)

        monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").touch()
    with pytest.raises(ConfigError) as caught:
        check_run(config)
    assert caught.value.where == key
