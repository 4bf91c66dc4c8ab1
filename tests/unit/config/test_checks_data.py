"""Contradictions between sources, their weights and the rows taken out."""

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.errors import ConfigError

TWO = ["data.sources.web={kind: files, path: a.txt, weight: 2}", "data.sources.stdlib.weight=1"]


def anneal(*changes):
    return [*TWO, f"data.anneal=[{','.join(changes)}]"]


# overrides -> (where, what or allowed contains, hint contains)
CONTRADICTIONS = [
    (["data=files"], "data.sources.files.path", "or as a URL", "data.sources.files.path=..."),
    (["data=hub"], "data.sources.hub.path", "Hub id or saved folder", "data.sources.hub.path=..."),
    (
        ["data.sources.stdlib.kind=tokens"],
        "data.sources.stdlib.path",
        "recipes/pretokenize.py",
        "data.sources.stdlib.path=runs/NAME/tokens",
    ),
    (
        ["data=tokens", "data.sources.tokens.path=runs/x/tokens"],
        "model.tokenizer.name",
        "needs the tokenizer that made them",
        "model.tokenizer.name=runs/x/tokens/tokenizer",
    ),
    (["data.chat.template=no.jinja"], "data.chat.template", "cannot be found", None),
    (
        ["data.chat.template_arguments={tools: 1}"],
        "data.chat.template_arguments.tools",
        "comes from the data",
        None,
    ),
    (["data.sources.stdlib.path=/x"], "data.sources.stdlib.path", "takes no path", "data.sources.stdlib.kind=files"),
    (["data.sources.stdlib.revision=a"], "data.sources.stdlib.revision", "only a dataset of the Hub", "kind=hub"),
    (TWO[:1], "data.sources.stdlib.weight", "some sources have a weight", "data.sources.stdlib.weight=1"),
    (["data.anneal=[{step: 5}]"], "data.anneal", "none at its start", "data.sources.stdlib.weight=1"),
    (anneal("{step: 0}"), "data.anneal[0].step", "a whole number > 0", None),
    (
        anneal("{step: 5, weights: {web: 1, stdlib: 0}}", "{step: 5, weights: {web: 1, stdlib: 2}}"),
        "data.anneal[1].step",
        "a whole number > 5",
        None,
    ),
    (anneal("{step: 5, weights: {wb: 1, stdlib: 1}}"), "data.anneal[0].weights", "no source 'wb'", "web: 1"),
    (anneal("{step: 5, weights: {web: 1}}"), "data.anneal[0].weights", "stdlib", "stdlib: 0 pauses it"),
    (anneal("{step: 5, weights: {web: -1, stdlib: 1}}"), "data.anneal[0].weights.web", "a number >= 0", None),
    (anneal("{step: 5, weights: {web: nan, stdlib: 1}}"), "data.anneal[0].weights.web", "a number >= 0", None),
    (anneal("{step: 5, weights: {web: 0, stdlib: 0}}"), "data.anneal[0].weights", "a sum > 0", None),
    (["data.sources.stdlib.weight=0"], "data.sources.stdlib.weight", "a number > 0", None),
    (["data.sources.stdlib.epochs=0"], "data.sources.stdlib.epochs", "a whole number >= 1", None),
    (["data.quarantine=[stdlb:abc.py:5]"], "data.quarantine", "no source 'stdlb'", "[stdlib:abc.py:5]"),
    (["data.quarantine=[abc.py:5]"], "data.quarantine", "SOURCE:FILE:ROW", "[stdlib:part-0.parquet:17]"),
    (["data.quarantine=['stdlib:abc.py:-5']"], "data.quarantine", "SOURCE:FILE:ROW", None),
]


@pytest.mark.parametrize(("overrides", "where", "words", "hint"), CONTRADICTIONS, ids=lambda v: str(v)[-60:])
def test_contradictions(overrides, where, words, hint):
    with pytest.raises(ConfigError) as caught:
        compose_config(overrides)
    error = caught.value
    assert error.where == where
    assert words in f"{error.what} {error.allowed}"
    if hint is not None:
        assert hint in (error.hint or ""), error


@pytest.mark.parametrize(
    "overrides",
    [
        TWO,
        anneal("{step: 5, weights: {web: 0, stdlib: 1}}", "{step: 9, weights: {web: 0.5, stdlib: 0}}"),
        ["data.quarantine=['stdlib:abc.py:0','stdlib:a:b/c.py:12']"],
        ["data=files", "data.sources.files.path=s3://bucket/a/*.parquet", "data.sources.files.epochs=1"],
        ["data=tokens", "data.sources.tokens.path=runs/x/tokens", "model.tokenizer.name=runs/x/tokens/tokenizer"],
    ],
    ids=str,
)
def test_what_is_fine_stays_fine(overrides):
    compose_config(overrides)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("https://user:secret@host/x.parquet", "user or password"),
        ("https://host/x.parquet?X-Amz-Signature=secret", "signature"),
        ("gopher://host/x.parquet", "cannot be read"),
    ],
)
def test_an_address_with_a_secret_is_refused_before_the_run_folder_is_written(path, words):
    with pytest.raises(ConfigError) as caught:
        compose_config(["data=files", f"data.sources.files.path='{path}'"])
    error = caught.value
    assert error.where.removesuffix(" (command line)") == "data.sources.files.path"
    assert words in error.what
    assert "secret" not in str(error)
