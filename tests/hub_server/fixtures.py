"""Fixtures: the server, with huggingface_hub pointed at it and caches of the test's own."""

from __future__ import annotations

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from tests.hub_server.server import running


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server with no repositories, which huggingface_hub asks instead of the Hub, over plain HTTP."""
    with running() as server:
        home = tmp_path / "hf-home"
        # As the environment would set them, were it read again: HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME, ...
        for name, value in {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        close_session()
        yield server
        close_session()
