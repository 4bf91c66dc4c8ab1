"""What a reader sees of an error."""

from hfdist.errors import CheckpointError, ConfigError, DataError, NumericsError, PartitionError, ResourceError


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
    kinds = (ConfigError, PartitionError, DataError, CheckpointError, NumericsError, ResourceError)
    assert [kind.exit_code for kind in kinds] == [2, 2, 3, 4, 5, 7]
