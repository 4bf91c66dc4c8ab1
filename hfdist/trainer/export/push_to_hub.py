"""The exported folder to the Hub: whether that will do is asked before the training, and it is done at the end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from huggingface_hub import HfApi, get_token, is_offline_mode

from hfdist.collectives import gather_json, rank
from hfdist.config.run import ExportConfig
from hfdist.errors import ConfigError, HfdistError, ResourceError
from hfdist.models.hub_client import LOG_IN, ask

logger = logging.getLogger(__name__)

_KEY = "export.push_to"
_LOOK_SECONDS = 1.0


def check_push(export: ExportConfig) -> None:
    """Make the repository and ask for the right to write to it, so that a run of days does not fail in the end.

    Raises:
        ConfigError: no token, or none that may write there.
        ResourceError: the Hub does not answer.
    """
    if export.push_to is None:
        return
    name = export.push_to
    if is_offline_mode():
        raise ConfigError(
            "an upload needs the Hub, which is switched off", where=_KEY, found=name, hint="unset HF_HUB_OFFLINE"
        )
    if get_token() is None:
        raise ConfigError("an upload needs a token, and none is given", where=_KEY, found=name, hint=LOG_IN)
    api = HfApi()

    def action() -> None:
        api.whoami()
        api.create_repo(name, private=export.private, exist_ok=True)
        api.auth_check(name, write=True)
        if export.revision is not None:
            api.create_branch(name, branch=export.revision, exist_ok=True)

    ask(action, key=_KEY, name=name)


def push(folder: Path, export: ExportConfig) -> HfdistError | None:
    """Upload the folder from rank 0, while the others wait. Call on all ranks.

    Files that are there already are not sent again, so an upload that broke off goes on.

    Returns:
        On rank 0, why it is not uploaded; the folder stays.
    """
    name = export.push_to
    if name is None:
        return None

    def upload() -> str:
        api = HfApi()

        def action() -> str:
            message = f"Upload {folder.name} of {folder.parent.name}"
            return str(
                api.upload_folder(
                    repo_id=name, folder_path=folder, revision=export.revision, commit_message=message
                ).commit_url
            )

        return ask(action, key=_KEY, name=name)

    try:
        url = _while_others_wait(upload)
    except HfdistError as error:
        branch = f" --revision {export.revision}" if export.revision else ""
        return ResourceError(
            f"the model is trained and saved, but not uploaded: {error.what}",
            where=_KEY,
            found=name,
            hint=f"{error.hint or 'later'}; then: hf upload {name} {folder} .{branch}",
        )
    if url is not None:
        logger.info("uploaded: %s", url)
    return None


def _while_others_wait(action: Callable[[], str]) -> str | None:
    """Run `action` on rank 0, in a thread: one collective that waits for it could take longer than it may."""
    if rank() != 0:
        while not gather_json(None)[0]:
            pass
        return None
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(action)
        while True:
            wait([task], timeout=_LOOK_SECONDS)
            is_done = task.done()
            gather_json(is_done)
            if is_done:
                return task.result()
