"""Secrets, told by the name of their key or by their shape: a config holds none, and no message shows one."""

from __future__ import annotations

import re

MASK = "***"

RAW_PASSWORD = r"(?!arn:)[^\s/?#:@\[]+:(?!\d*[/?#])[^\s@\"'<>]{0,200}"
"""The user and password of an address, where the password has a slash or the like that should be quoted."""

# How tokens of large services begin, and how addresses carry passwords and signatures.
_SHAPES = {
    "a token of the Hugging Face Hub": r"(?<![A-Za-z0-9])(?:hf|api_org)_(?=\w*[A-Z])(?=\w*[a-z])[A-Za-z0-9]{30,}",
    "a token of GitHub or GitLab": r"(?<![A-Za-z0-9])(?:gh[opsur]_[A-Za-z0-9]{30,}|github_pat_\w{22,}"
    r"|gl(?:pat|dt|rt|ptt|cbt|soat|ft|imt|agent)-(?=[\w.-]*\d)[\w.-]{20,})",
    "a key of AWS": r"(?<![A-Za-z0-9])A(?:KIA|SIA|BIA|CCA)[A-Z0-9]{16}\b",
    "a key of Google": r"(?:AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,})",
    # With a long part without dashes, and digits: names of files and datasets begin so, too.
    "a key of an API": r"(?<![\w-])(?:(?:sk|xai|pplx)-(?=[\w-]*[A-Za-z0-9]{16})(?=[\w-]*\d)[\w-]{20,}"
    r"|(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{20,}|xox[abeoprs]-(?=[\w-]*\d)[\w-]{10,}|xapp-\d-[\w-]{20,}|nvapi-[\w-]{60,}"
    r"|npm_[A-Za-z0-9]{36}|wandb_v1_\w{30,}|local-[0-9a-f]{40}\b|pypi-(?=[\w-]*[A-Z])[\w-]{50,}"
    r"|(?:gsk|r8)_(?=\w*\d)[A-Za-z0-9]{36,}|dckr_pat_[\w-]{20,}|SG\.[\w-]{16,}\.[\w-]{16,})",
    "a signed token": r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]*",
    # Without an end, all that follows: a message may be cut.
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(?s:.)*?"
    r"(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
    "a header that authorizes": r"(?i:\bauthorization['\"]?\s*[:=]\s*['\"]?(?:basic|bearer|token)\s+[^\s,}\]'\"*]+"
    r"|\bbearer\s+(?=\S*\d)[\w.~+/-]{16,}=*)",
    "the address of a webhook": r"(?<=hooks\.slack\.com/services/)[\w/]{20,}|(?<=/api/webhooks/)\d+/[\w-]{20,}",
    # It ends at the last @ before a path: passwords hold some, too.
    "a user or password": rf"(?<=://)(?:[^\s/?#]+|{RAW_PASSWORD})(?=@)",
    "a signature or password": r"(?i:(?<=[?&])(?:x-(?:amz|goog)-(?:signature|security-token|credential)|awsaccesskeyid"
    r"|key-pair-id|policy|signature|sig|token|access_token|auth|key|api_?key|secret|password)=[^\s&#]*)",
}
_SHAPE = re.compile("|".join(_SHAPES.values()))
_NAME = (
    r"(?:[\w-]*[_-])?(?:token|password|passwd|passphrase|secret|credentials?|authorization"
    r"|(?:api|access|secret|private|signing|encryption|account)[_-]?key)"
)
# With a colon only after a name of several words: "a token: ..." is prose. A vocabulary's tokens stay.
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
    if not re.fullmatch(_NAME, name, re.IGNORECASE) or value is None or isinstance(value, (bool, dict, list, tuple)):
        return False
    is_of_vocabulary = name.lower().endswith("token") and re.fullmatch(r"<.*>|\[.*\]|[\d.]+", str(value))
    return str(value) not in ("", MASK) and not is_of_vocabulary


def mask_secrets(text: str) -> str:
    """Give the text with stars in place of what has a secret's shape, or is assigned to a secret's name."""
    return _ASSIGNED.sub(rf"\1{MASK}", _SHAPE.sub(MASK, text))
