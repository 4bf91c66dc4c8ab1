"""What a reader sees of an error."""

from hfdist import errors
from hfdist.errors import ConfigError, DataError


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
