"""What the first examples of a corpus are: turns of a chat, or plain text that a model of chats is warned of."""

import json
from types import SimpleNamespace

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.data import are_chats, open_corpus
from hfdist.errors import DataError
from hfdist.run.data_advice import advise
from hfdist.tune.student_answers import check_prompts

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
PAIR = {"prompt": "a", "completion": "b"}
MODEL = ("model=hub", "model.name=OWNER/NAME", "data.lanes=1")
WITH_TEMPLATE, WITHOUT = SimpleNamespace(chat_template="{{ messages }}"), SimpleNamespace(chat_template=None)


def open_rows(tmp_path, rows, *overrides, name="finetune"):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = compose_config([*MODEL, f"data={path}", *overrides], name=name)
    return open_corpus(config.data), config


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([CHAT], True),
        ([{"instruction": "a", "output": "b"}], True),
        ([PAIR], False),
        ([{"messages": []}, PAIR], False),  # the first that can be read
        ([{"text": '{"messages": []}'}], None),
    ],
)
def test_a_chat_is_told_from_text(tmp_path, rows, found):
    corpus, _ = open_rows(tmp_path, rows)
    assert are_chats(corpus) is found


def test_pairs_whose_answers_are_alike_are_warned_of(tmp_path):
    pair = {"prompt": "a", "chosen": "b", "rejected": "b"}
    alike = [pair, {name: [{"role": "assistant", "content": text}] for name, text in pair.items()} | {"prompt": "a"}]
    corpus, config = open_rows(tmp_path, alike, name="tune")
    assert "the same in each of the first pairs" in advise(corpus, WITHOUT, config)
    corpus, config = open_rows(tmp_path, [*alike, pair | {"rejected": "c"}], name="tune")
    assert advise(corpus, WITHOUT, config) is None


def test_plain_text_for_a_model_of_chats_is_warned_of_with_what_makes_it_turns(tmp_path):
    corpus, config = open_rows(tmp_path, [PAIR])
    hint = "data.columns={instruction: prompt, output: completion}"
    assert advise(corpus, WITH_TEMPLATE, config).endswith(f"'{hint}'")
    assert advise(corpus, WITHOUT, config) is None
    corpus, config = open_rows(tmp_path, [PAIR], hint)
    assert advise(corpus, WITH_TEMPLATE, config) is None, "the hint leads to turns"
    named = [{"question": "a", "answer": "b"}]
    corpus, config = open_rows(tmp_path, named, "data.columns={prompt: question, completion: answer}")
    assert "{instruction: question, output: answer}" in advise(corpus, WITH_TEMPLATE, config)
    corpus, config = open_rows(tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c"}], name="tune")
    assert advise(corpus, WITH_TEMPLATE, config).endswith("lists of messages")
    corpus, config = open_rows(tmp_path, [PAIR], "model.init=random")
    assert advise(corpus, WITH_TEMPLATE, config) is None


@pytest.mark.parametrize("rows", [[{"text": "a"}], [{"text": '{"prompt": "a"}'}], [PAIR]])
@pytest.mark.parametrize("row_format", ["auto", "text"])
def test_a_model_that_answers_needs_prompts(tmp_path, rows, row_format):
    """Of each source: the second one is asked, too."""
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(PAIR))
    text = "text" if row_format == "auto" or "text" in rows[0] else "prompt"
    more = (f"+data.sources.a={{path: {other}, weight: 1}}", "data.sources.files.weight=1")
    own = (f"data.sources.files.format={row_format}", f"data.sources.files.text={text}")
    corpus, _ = open_rows(tmp_path, rows, *more, *own)
    if row_format == "auto" and rows == [PAIR]:
        check_prompts(corpus)
    else:
        with pytest.raises(DataError, match="no prompts to answer") as refused:
            check_prompts(corpus)
        assert refused.value.where == "data.sources.files"
