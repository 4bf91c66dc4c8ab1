"""What --help says of the keys, from the comments in conf/."""

from hfdist.config.composition.compose import compose_untyped, make_request
from hfdist.config.composition.help import describe, descriptions
from hfdist.config.schema import all_keys, members


def test_each_key_is_explained():
    values = [name for name in all_keys() if not members(name) and not name.endswith("*")]
    held_out = "data.eval_sources.*."
    said = descriptions()
    assert not [name for name in values if name.replace(held_out, "data.sources.*.") not in said]


def test_a_key_stands_with_its_value_and_its_line():
    request = make_request("pretrain", ["train.max_steps=7", "data.sources.mine.path=x"], None)
    lines = describe(compose_untyped(request), request).splitlines()
    (line,) = [line for line in lines if line.startswith("    max_steps: 7 ")]
    assert line.endswith("# optimizer steps at the most; null: as many as the epochs take")
    assert [line for line in lines if line.startswith("        path: x ") and "# files: file, folder" in line]
    assert "  strategy: ddp, pipeline, pipeline_zero1, single, zero1, zero2, zero3, zero3_offload" in lines
