"""Prompts as token ids: as text, or through the tokenizer's chat template."""

import pytest

from hfdist.config.data import ChatConfig
from hfdist.config.run import Chat
from hfdist.errors import ConfigError
from hfdist.models.tokenizer import train_bpe
from hfdist.trainer.evaluation.generation import encode_prompts

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)

PLAIN = ChatConfig()


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(["def add(a, b): return a + b"] * 4, 300)


def texts(tokenizer, *prompts, chat, rendering=PLAIN):
    return [tokenizer.decode(ids) for ids in encode_prompts(tokenizer, prompts, chat, rendering)]


@pytest.fixture
def chatting(tokenizer):
    tokenizer.chat_template = TEMPLATE
    yield tokenizer
    tokenizer.chat_template = None


def test_text_is_text_where_there_is_no_template(tokenizer):
    assert texts(tokenizer, "def a", "x", chat=Chat.auto) == ["def a", "x"]


def test_a_template_makes_a_prompt_of_a_message(chatting):
    assert texts(chatting, "hello", chat=Chat.auto) == ["<user>hello<answer>"]
    assert texts(chatting, "hello", chat=Chat.always) == ["<user>hello<answer>"]
    assert texts(chatting, "hello", chat=Chat.never) == ["hello"]


def test_a_prompt_is_rendered_as_the_conversations_are(chatting):
    chatting.chat_template = TEMPLATE + "{{ mood }}"
    rendering = ChatConfig(system="Be brief.", template_arguments={"mood": "!"})
    assert texts(chatting, "hello", chat=Chat.auto, rendering=rendering) == ["<system>Be brief.<user>hello<answer>!"]


def test_a_template_that_is_missing_is_said(tokenizer):
    with pytest.raises(ConfigError, match="no chat template") as caught:
        encode_prompts(tokenizer, ["a"], Chat.always, PLAIN)
    assert caught.value.where == "evaluate.chat"


def test_a_template_that_refuses_a_prompt_is_said(chatting):
    chatting.chat_template = "{{ raise_exception('a system message first') }}"
    with pytest.raises(ConfigError, match="a system message first") as caught:
        encode_prompts(chatting, ["a"], Chat.auto, PLAIN)
    assert (caught.value.where, caught.value.hint) == ("evaluate.prompts", "evaluate.chat=never")
