# ruff: noqa: RUF001  DeepSeek's style has bars of full width
"""Chat templates in the styles of well-known models, written for these tests, and what of each is to be learned.

Targets stand between brackets. `{% generation %}` is taken out for the tests in which turns must be found without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hfdist.models.tokenizer import train_bpe

OPEN, SHUT = "\u27e6", "\u27e7"


@dataclass(frozen=True)
class Style:
    """A template, its special tokens, and conversations with what they become."""

    template: str
    special: list[str]
    end: str
    cases: dict[str, tuple[list[dict[str, Any]], str]]
    tools: list[dict[str, Any]] | None = None
    tokens: list[str] = field(default_factory=list)
    """Added, but not special."""


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def result(text):
    return {"role": "tool", "content": text, "tool_call_id": "call00000", "name": "add"}


def call(**arguments):
    return [{"type": "function", "id": "call00000", "function": {"name": "add", "arguments": arguments}}]


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

CHATML = Style(
    template="{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    special=["<|im_start|>", "<|im_end|>"],
    end="<|im_end|>",
    cases={
        "turns": (
            [system("Be brief."), user("Hi"), said("Hello"), user("Hello"), said("Hi ")],
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n⟦Hello<|im_end|>⟧\n<|im_start|>user\nHello<|im_end|>\n"
            "<|im_start|>assistant\n⟦Hi <|im_end|>⟧\n",
        ),
        "unicode": (
            [user("naïve 日本"), said("  🙂 e\u0301\n\n")],
            "<|im_start|>user\nnaïve 日本<|im_end|>\n<|im_start|>assistant\n⟦  🙂 e\u0301\n\n<|im_end|>⟧\n",
        ),
        "empty": (
            [user("Hi"), said(""), user(""), said("x")],
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦<|im_end|>⟧\n"
            "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n⟦x<|im_end|>⟧\n",
        ),
        "the same words everywhere": (
            [user("assistant"), said("assistant"), user("assistant\nassistant"), said("assistant")],
            "<|im_start|>user\nassistant<|im_end|>\n<|im_start|>assistant\n⟦assistant<|im_end|>⟧\n"
            "<|im_start|>user\nassistant\nassistant<|im_end|>\n<|im_start|>assistant\n⟦assistant<|im_end|>⟧\n",
        ),
        "the assistant begins": (
            [said("Hello"), user("Hi"), said("Yes?")],
            "<|im_start|>assistant\n⟦Hello<|im_end|>⟧\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n⟦Yes?<|im_end|>⟧\n",
        ),
    },
)

LLAMA = Style(
    template="{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endgeneration %}"
    "{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    special=["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    end="<|eot_id|>",
    tools=TOOLS,
    cases={
        "trimmed": (
            [system(" s "), user("  Hi\n"), said("\n Hello  "), user("And?"), said("Bye")],
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\ns<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello<|eot_id|>⟧"
            "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Bye<|eot_id|>⟧",
        ),
        "a call": (
            [user("1+2"), said("", tool_calls=call(a=1, b=2)), result("3"), said("It is 3.")],
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1+2<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
            '⟦{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>⟧'
            "<|start_header_id|>tool<|end_header_id|>\n\n3<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦It is 3.<|eot_id|>⟧",
        ),
    },
)

MISTRAL = Style(
    template="{% if messages[0].role == 'system' %}{% set first = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}"
    "{% set ns = namespace(n=0) %}{% for m in rest %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}{{ bos_token }}"
    "{% for m in rest %}{% if m.role == 'user' %}"
    "[INST] {% if loop.last and first is defined %}{{ first }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' and m.tool_calls %}{% generation %}[TOOL_CALLS] ["
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]{{ eos_token }}{% endgeneration %}"
    "{% elif m.role == 'assistant' %}{% generation %} {{ m.content | trim }}{{ eos_token }}{% endgeneration %}"
    "{% else %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}",
    special=["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    end="</s>",
    cases={
        "a moved system prompt": (
            [system("Be brief."), user("Hi"), said("Hello"), user("And?"), said("Bye")],
            "<s>[INST] Hi[/INST]⟦ Hello</s>⟧[INST] And?[/INST]⟦ Bye</s>⟧",
        ),
        "a call": (
            [user("1+2"), said("", tool_calls=call(a=1)), result("3"), said("It is 3."), user("Thanks"), said("Ok")],
            '<s>[INST] 1+2[/INST]⟦[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]</s>⟧'
            "[TOOL_RESULTS] 3[/TOOL_RESULTS]⟦ It is 3.</s>⟧[INST] Thanks[/INST]⟦ Ok</s>⟧",
        ),
    },
)

GEMMA = Style(
    template="{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<end_of_turn>{% endgeneration %}"
    "{% else %}{{ m.content | trim }}<end_of_turn>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    special=["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    end="<eos>",
    cases={
        "turns": (
            [user("Hi "), said(" Hello"), user("model"), said("user")],
            "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n⟦Hello<end_of_turn>⟧\n"
            "<start_of_turn>user\nmodel<end_of_turn>\n<start_of_turn>model\n⟦user<end_of_turn>⟧\n",
        ),
    },
)

ZEPHYR = Style(
    template="{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    special=["</s>"],
    end="</s>",
    cases={
        # The headers are text, which a message may hold: it stays context.
        "headers that are text": (
            [system("s"), user("Say <|assistant|>\nno"), said("<|user|>\nyes"), user("x"), said("y")],
            "<|system|>\ns</s>\n<|user|>\nSay <|assistant|>\nno</s>\n<|assistant|>\n⟦<|user|>\nyes</s>⟧\n"
            "<|user|>\nx</s>\n<|assistant|>\n⟦y</s>⟧\n",
        ),
    },
)

PHI = Style(
    template="{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    special=["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
    end="<|endoftext|>",
    cases={
        "an end of text after it": (
            [system("s"), user("Hi"), said("Hello"), user("And?"), said("Bye")],
            "<|system|>\ns<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n⟦Hello<|end|>⟧\n"
            "<|user|>\nAnd?<|end|>\n<|assistant|>\n⟦Bye<|end|>⟧\n<|endoftext|>",
        ),
    },
)

QWEN = Style(
    template="{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n"
    "{% endif %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n"
    "{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}{% set content = m.content %}{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n{% generation %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>{% endgeneration %}\n"
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    special=["<|im_start|>", "<|im_end|>"],
    tokens=["<think>", "</think>", "<tool_call>", "</tool_call>"],
    end="<|im_end|>",
    cases={
        "thoughts of earlier turns are dropped": (
            [
                user("Hi"),
                said("<think>\nA guest.\n</think>\n\nHello"),
                user("And?"),
                said("<think>\nHm.\n</think>\n\nBye"),
            ],
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello<|im_end|>⟧\n"
            "<|im_start|>user\nAnd?<|im_end|>\n"
            "<|im_start|>assistant\n⟦<think>\nHm.\n</think>\n\nBye<|im_end|>⟧\n",
        ),
        "thoughts in their own field, and none": (
            [user("Hi"), said("Hello", reasoning_content="A guest.")],
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦<think>\nA guest.\n</think>\n\nHello<|im_end|>⟧\n",
        ),
        "an empty thought is learned": (
            [user("Hi"), said("Hello")],
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nHello<|im_end|>⟧\n",
        ),
        "calls": (
            [user("1+2"), said("Let me see.", tool_calls=call(a=1)), result("3"), result("4"), said("It is 3.")],
            "<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nLet me see.\n"
            '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>⟧\n'
            "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nIt is 3.<|im_end|>⟧\n",
        ),
    },
)

DEEPSEEK = Style(
    template="{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}<｜Assistant｜>"
    "{% elif m.role == 'assistant' and m.tool_calls %}{% generation %}<｜calls｜>"
    "{% for c in m.tool_calls %}<｜call｜>{{ c.function.name + '\n' + c.function.arguments }}<｜/call｜>{% endfor %}"
    "<｜/calls｜>{{ eos_token }}{% endgeneration %}"
    "{% elif m.role == 'assistant' %}{% generation %}{{ m.content.split('</think>')[-1] }}{{ eos_token }}"
    "{% endgeneration %}{% elif m.role == 'tool' %}<｜out｜>{{ m.content }}<｜/out｜>{% endif %}{% endfor %}",
    special=["<｜begin｜>", "<｜end｜>", "<｜User｜>", "<｜Assistant｜>", "<｜calls｜>", "<｜/calls｜>", "<｜call｜>",
             "<｜/call｜>", "<｜out｜>", "<｜/out｜>"],
    end="<｜end｜>",
    cases={
        "thoughts are dropped": (
            [system("s"), user("Hi"), said("<think>x</think>Hello"), user("And?"), said("Bye")],
            "<｜begin｜>s<｜User｜>Hi<｜Assistant｜>⟦Hello<｜end｜>⟧<｜User｜>And?<｜Assistant｜>⟦Bye<｜end｜>⟧",
        ),
        "a call whose arguments must be text": (
            [user("1+2"), said("", tool_calls=call(a=1)), result("3"), said("It is 3.")],
            "<｜begin｜><｜User｜>1+2<｜Assistant｜>"
            '⟦<｜calls｜><｜call｜>add\n{"a": 1}<｜/call｜><｜/calls｜><｜end｜>⟧'
            "<｜out｜>3<｜/out｜>⟦It is 3.<｜end｜>⟧",
        ),
    },
)  # fmt: skip

HARMONY = Style(
    template="{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.tool_calls %} to={{ m.tool_calls[0].function.name }}<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}{% endgeneration %}"
    "{% elif m.role == 'tool' %}{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('No call') }}"
    "{% endif %} {{ messages[loop.index0 - 1].tool_calls[0].function.name }}<|message|>{{ m.content }}<|end|>"
    "{% else %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    special=["<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"],
    end="<|return|>",
    cases={
        "turns that end in several ways": (
            [user("1+2"), said("", tool_calls=call(a=1)), result("3"), said("It is 3."), user("Ok"), said("Bye")],
            '<|start|>user<|message|>1+2<|end|><|start|>assistant⟦ to=add<|message|>{"a": 1}<|call|>⟧'
            "<|start|>tool add<|message|>3<|end|><|start|>assistant⟦<|message|>It is 3.<|end|>⟧"
            "<|start|>user<|message|>Ok<|end|><|start|>assistant⟦<|message|>Bye<|return|>⟧",
        ),
    },
)

PLAIN = Style(
    template="{% for m in messages %}### {{ m.role | capitalize }}:\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}"
    "{{ '' if loop.last else '\n\n' }}{% endfor %}{% if add_generation_prompt %}\n\n### Assistant:\n{% endif %}",
    special=[],
    end="<|endoftext|>",
    cases={
        # Nothing in the template ends a turn, so an end of text is put after the last one.
        "no special tokens": (
            [user("Hi"), said("Hello"), user("And?"), said("Bye")],
            "### User:\nHi\n\n### Assistant:\n⟦Hello⟧\n\n### User:\nAnd?\n\n### Assistant:\n⟦Bye<|endoftext|>⟧",
        ),
    },
)

STYLES = {
    "chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "gemma": GEMMA, "zephyr": ZEPHYR, "phi": PHI, "qwen": QWEN,
    "deepseek": DEEPSEEK, "harmony": HARMONY, "plain": PLAIN,
}  # fmt: skip
CASES = [(style, case) for style, one in STYLES.items() for case in one.cases]


@cache
def chat_tokenizer(name: str, *, marked: bool = False):
    """A byte-level BPE with the special tokens and the template of a style."""
    style = STYLES[name]
    tokenizer = train_bpe(["user assistant system model Hello Hi Bye It is 3. thanks tool name add think "] * 20, 420)
    firsts = ["<|begin_of_text|>", "<s>", "<bos>", "<｜begin｜>"]
    begin = next((token for token in style.special if token in firsts), style.end)
    extra = [token for token in style.special if token not in (begin, style.end)]
    tokenizer.add_special_tokens({"eos_token": style.end, "bos_token": begin, "additional_special_tokens": extra})
    tokenizer.add_tokens(style.tokens)
    template = style.template
    if not marked:
        template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    # Jinja would swallow a line break after a block.
    tokenizer.chat_template = template.replace("%}\n", "%}{{ '\n' }}")
    return tokenizer


def bracketed(tokenizer, tokens) -> str:
    """Decoded, with brackets around each run of targets."""
    text = ""
    runs: list[tuple[bool, list[int]]] = []
    for token in tokens.tolist():
        if not runs or runs[-1][0] != (token >= 0):
            runs.append((token >= 0, []))
        runs[-1][1].append(token if token >= 0 else ~token)
    for is_open, ids in runs:
        decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text += f"{OPEN}{decoded}{SHUT}" if is_open else decoded
    return text
