"""What a reader sees of an error, and what counts as a secret, by its shape and by the name that it is given."""

import pytest

from hfdist import errors
from hfdist.errors import ConfigError, DataError
from hfdist.secrets import kind_of_secret, mask_secrets, names_secret


def test_all_parts_have_their_line():
    error = ConfigError("too many", where="train.max_steps", found=3, allowed="<= 2", hint="train.max_steps=2")
    assert str(error).splitlines() == [
        "Config error: too many",
        "  where:   train.max_steps",
        "  found:   3",
        "  allowed: <= 2",
        "  try:     train.max_steps=2",
    ]


def test_control_characters_cannot_reach_the_terminal_and_long_values_are_cut():
    text = str(DataError("bad row", found="a\x1b[31mred\x00" + "x" * 1000))
    assert "\x1b" not in text
    assert "\\x1b[31mred\\x00" in text
    assert text.endswith(" ...")


def test_several_values_are_one_text_for_another_process():
    assert DataError("they are bad", found=("one", 2)).texts()["found"] == "one; 2"


def test_exit_codes_are_the_documented_ones():
    kinds = ["Config", "Partition", "Data", "Checkpoint", "Numerics", "Peer", "Resource", "Preempted"]
    assert [getattr(errors, f"{kind}Error").exit_code for kind in kinds] == [2, 2, 3, 4, 5, 6, 7, 75]


def test_names_of_files_and_columns_forge_no_line_and_show_no_secret():
    name = "a\n  try:     rm -rf x\x1b[2J\u202e\udcff"
    secret = "hf_" + "aB3" * 11
    error = ConfigError(name, where=name, found=(name, secret), allowed=name, hint=f"{name} {secret}")
    lines = str(error).splitlines()
    escaped = "a\\n  try:     rm -rf x\\x1b[2J\\u202e\\udcff"
    assert lines == [
        f"Config error: {escaped}",
        f"  where:   {escaped}",
        f"  found:   {escaped}",
        "           ***",
        f"  allowed: {escaped}",
        f"  try:     {escaped} ***",
    ]
    str(error).encode()


def test_no_part_of_a_message_is_endless():
    part = "x" * 10**6
    assert len(str(ConfigError(part, where=part, found=part, allowed=part, hint=part))) < 15_000


def test_a_secret_that_is_cut_after_a_masked_one_is_not_shown():
    key = f"-----BEGIN PRIVATE KEY-----{'x' * 930}-----END PRIVATE KEY-----"
    assert errors.printable(f"{key} use {HUB}", 500) == "*** use ..."
    filled = errors.printable(f"{key[100:]} {'y ' * 30}use {HUB}", 500)
    assert "hf_" not in filled
    assert errors.printable("token=" + "x" * 3_000, 500) == "token=*** ..."


HUB = "hf_" + "aB3" * 11
SECRETS = [
    HUB,
    "ghp_" + "a1B2" * 9,
    "github_pat_" + "11A_b" * 8,
    "glpat-" + "x1-" * 8,
    "AKIA" + "A1B2" * 4,
    "AIza" + "x" * 35,
    "sk-ant-" + "x1" * 20,
    "xoxb-1234567890-abc",
    ".".join(["eyJ" + "a1" * 10, "eyJ" + "b2" * 10, "sig"]),
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN RSA PRIVATE KEY-----\nDEK-Info: AES-128-CBC,A1\n\nMIIE\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nlQ-x\n-----END PGP PRIVATE KEY BLOCK-----",
    "glpat-" + "x1" * 13 + ".01.a1b2c3d4e",
    "glrt-" + "x1-" * 8,
    "GOCSPX-" + "x1-" * 9,
    "xapp-1-A01-123-" + "ab" * 16,
    "sk_live_" + "a1" * 12,
    "gsk_" + "a1B" * 17,
    "nvapi-" + "a1B_" * 16,
    "dckr_pat_" + "a-1" * 9,
    "local-" + "0123456789abcdef" * 2 + "01234567",
    "SG." + "a1" * 11 + "." + "b2" * 20,
    "Bearer " + "a1.b" * 5,
    "Authorization: Basic YW5uOnB3",
    "authorization': 'token pw1",
]
HARMLESS = [
    "runs/first",
    "hf_transfer",
    "meta-llama/Llama-3.1-8B",
    "0123456789abcdef0123456789abcdef01234567",  # a commit
    "https://host/a.parquet?download=1&sort_key=3",
    "git@github.com:a/b",
    "task-that-has-a-rather-long-name-with-dashes",
    "a token: of the vocabulary",
    "pad_token='<pad>', eos_token=</s>, mask_token=[MASK]",
    "models--a--b/snapshots/0123456789abcdef0123456789abcdef01234567/model.safetensors",
    "runs/hf_LlamaTokenizerBaseline",
    "data/sk-learn-documentation-corpus-2024.jsonl",
    "xoxo-gossip-girl.jsonl",
    "npm_packages_of_the_whole_javascript_world.jsonl",
    "pypi-simple-index-of-all-the-packages-of-the-whole-world-2024.jsonl",
    "hf://datasets/a/b@main/x.parquet",
    "https://host:80/a@b",
    "s3://arn:aws:s3:eu-west-1:123:accesspoint/a/b@c",
    "the bearer of good news in 2024, and the bearer transformer-architecture",
    "basic transformer-architecture-2017",
    "glft-of-words.jsonl",
    "local-models/0123456789abcdef",
    "gsk_reports_of_the_whole_company_by_year",
    "-----BEGIN CERTIFICATE-----",
    "https://hooks.slack.com/services/ is where webhooks are",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_a_shape_is_known_and_masked_within_a_text(secret):
    assert kind_of_secret(f"x {secret} y") is not None
    assert mask_secrets(f"x {secret} y") == "x *** y"


@pytest.mark.parametrize("text", HARMLESS)
def test_other_text_stays(text):
    assert kind_of_secret(text) is None
    assert mask_secrets(text) == text


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://ann:pw1@host/a?x=1&sig=pw1", "https://***@host/a?x=1&***"),
        ("postgres://ann:p@ss@host/a", "postgres://***@host/a"),
        ("postgres://ann:p/1?2@host/a", "postgres://***@host/a"),
        ("https://hooks.slack.com/services/T0A1/B0A1/x1y2z3x1y2z3", "https://hooks.slack.com/services/***"),
        ("https://discord.com/api/webhooks/123/x1y2z3x1y2z3x1y2z3x1", "https://discord.com/api/webhooks/***"),
        ("cut -----BEGIN PRIVATE KEY-----\nMIIE-x", "cut ***"),
        ("AWS_AKIA" + "A1B2" * 4 + " and TOKEN_" + HUB, "AWS_*** and TOKEN_***"),
        ("--hub_token=pw1 a=1", "--hub_token=*** a=1"),
        ("api_key=[pw1]", "api_key=***]"),
        ("{'api_key': 'pw1', 'a': 1}", "{'api_key': '***', 'a': 1}"),
        ("train.arguments.hub_token=...", "train.arguments.hub_token=..."),
    ],
)
def test_what_an_address_or_a_name_gives_away_is_masked(text, masked):
    assert mask_secrets(text) == masked


@pytest.mark.parametrize(
    ("key", "value", "is_one"),
    [
        ("train.arguments.hub_token", "x", True),
        ("token", "x", True),
        ("a.API-Key", "x", True),
        ("a.aws_secret_access_key", "x", True),
        ("a.password", 1234, True),
        ("a.hub_token", None, False),
        ("a.use_auth_token", True, False),
        ("a.hub_token", "", False),
        ("model.config.image_token", "<image>", False),
        ("model.config.pad_token", 0, False),
        ("model.config.mask_token", ("<a>", "<b>"), False),
        ("data.token_cache_bytes", 5, False),
        ("optimizer.warmup_tokens", 5, False),
        ("a.sort_key", "x", False),
    ],
)
def test_a_name_tells_a_secret_unless_the_value_cannot_be_one(key, value, is_one):
    assert names_secret(key, value) is is_one
