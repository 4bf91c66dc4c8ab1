"""Secrets, told by the name of their key or by their shape: a config holds none, and no message shows one."""

from __future__ import annotations

import re

MASK = "***"

# How tokens of large services begin, and how addresses carry passwords and signatures.
_SHAPES = {
    "a token of the Hugging Face Hub": r"\b(?:hf|api_org)_(?=\w*[A-Z])(?=\w*[a-z])[A-Za-z0-9]{30,}",
    "a token of GitHub or GitLab": r"\b(?:gh[opsur]_[A-Za-z0-9]{30,}|github_pat_\w{22,}|glpat-[\w-]{20,})",
    "a key of AWS": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "a key of Google": r"\b(?:AIza[\w-]{35}|ya29\.[\w-]{20,})",
    # With a long part without dashes, and digits: names of files and datasets begin so, too.
    "a key of an API": r"(?<![\w-])(?:sk-(?=[\w-]*[A-Za-z0-9]{16})(?=[\w-]*\d)[\w-]{20,}"
    r"|xox[abeoprs]-(?=[\w-]*\d)[\w-]{10,}|npm_[A-Za-z0-9]{36}|wandb_v1_\w{30,}|pypi-(?=[\w-]*[A-Z])[\w-]{50,})",
    "a signed token": r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]*",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(?:-----END [A-Z ]*PRIVATE KEY-----)?",
    "a user or password": r"(?<=://)[^\s/?#@]+(?=@)",
    "a signature or password": r"(?i:(?<=[?&])(?:x-(?:amz|goog)-(?:signature|security-token|credential)|awsaccesskeyid"
    r"|key-pair-id|policy|signature|sig|token|access_token|auth|key|api_?key|secret|password)=[^\s&#]*)",
}
_SHAPE = re.compile("|".join(_SHAPES.values()))
_NAME = (
    r"(?:[\w-]*[_-])?(?:token|password|passwd|passphrase|secret|credentials?|authorization"
    r"|(?:api|access|secret|private|signing|encryption|account)[_-]?key)"
)
# With a colon only behind a name of several words: "a token: ..." is prose. A vocabulary's tokens stay.
_ASSIGNED = re.compile(
    rf"((?<![\w-])(?:{_NAME}['\"]?=|(?=[\w-]*[_-]){_NAME}['\"]?:\s*)['\"]?)(?!\*\*\*|\.\.\.|<[^\s<>]*>"
    r"|\[(?-i:[A-Z]+)\])[^\s,}\]'\"]+",
    re.IGNORECASE,
)


def kind_of_secret(text: str) -> str | None:
    """Say what secret a text holds, by its shape; None: none that is known."""
    if not _SHAPE.search(text):
        return None
    return next(kind for kind, shape in _SHAPES.items() if re.search(shape, text))


def names_secret(key: str, value: object) -> bool:
    """Whether a key's last part names a secret, and the value may be one: a vocabulary's tokens, as `<s>`, are not."""
    name = key.rpartition(".")[2]
    if not re.fullmatch(_NAME, name, re.IGNORECASE) or value is None or isinstance(value, (bool, dict, list)):
        return False
    is_of_vocabulary = name.lower().endswith("token") and re.fullmatch(r"<.*>|\[.*\]|[\d.]+", str(value))
    return str(value) not in ("", MASK) and not is_of_vocabulary


def mask_secrets(text: str) -> str:
    """Give the text with stars in place of what has a secret's shape, or is assigned to a secret's name."""
    return _ASSIGNED.sub(rf"\1{MASK}", _SHAPE.sub(MASK, text))
