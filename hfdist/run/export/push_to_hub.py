"""Uploads the exported folder to the Hub: checked before the training, done at the end."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

from huggingface_hub import HfApi, get_token, is_offline_mode

from hfdist.config.run import ExportConfig
from hfdist.errors import ConfigError, HfdistError, ResourceError
from hfdist.models.hub_client import LOG_IN, ask_hub

logger = logging.getLogger(__name__)

_KEY = "export.push_to"


def check_push(export: ExportConfig) -> None:
    """Make the repository and ask for the right to write to it, so that a run of days does not fail in the end.

    Raises:
        ConfigError: there is no token, no such owner or no right to write, or the Hub is switched off.
        ResourceError: the Hub is not reached, or is busy.
    """
    name = export.push_to
    if name is None:
        return
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

    ask_hub(action, key=_KEY, name=name)


def push(folder: Path, export: ExportConfig) -> HfdistError | None:
    """Upload the folder from this process; give why it is not uploaded, if so.

    Files that are there already are not sent again, so an upload that broke off goes on.
    """
    name = export.push_to
    if name is None:
        return None

    def action() -> str:
        message = f"Upload {folder.name} of {folder.parent.name}"
        done = HfApi().upload_folder(repo_id=name, folder_path=folder, revision=export.revision, commit_message=message)
        return str(done.commit_url)

    try:
        logger.info("uploaded: %s", ask_hub(action, key=_KEY, name=name))
    except HfdistError as error:
        branch = f" --revision {shlex.quote(export.revision)}" if export.revision else ""
        what = f"the model is trained and saved, but not uploaded: {error.what}"
        hint = f"{error.hint or 'later'}; then: hf upload {name} {shlex.quote(str(folder))} .{branch}"
        return ResourceError(what, where=_KEY, found=name, hint=hint)
    return None
