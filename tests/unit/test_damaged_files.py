"""Damaged files of a model, a tokenizer or an adapter give one of our errors, or what they say; never a traceback."""

import contextlib
import copy
import functools
import json
import random
import shutil

import gguf
import numpy as np
import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from hfdist import apart
from hfdist.apart import do_apart
from hfdist.config.model import AdapterConfig, Init, ModelConfig, TokenizerConfig
from hfdist.errors import ConfigError, HfdistError
from hfdist.models import TrainableParameters, build_model, find_architecture
from hfdist.models.gguf import convert_gguf
from hfdist.models.peft_config import check_adapter
from hfdist.models.resolve import resolve_model
from hfdist.models.tokenizer import load_pretrained_tokenizer, train_bpe
from tests.huge_pages import use_huge_pages
from tests.marks import many

STRANGE = (None, True, -1, 0, 3, 2**31, 2**63, 1e12, 0.5, "", "x", "gelu", [], {}, [[]], {"a": 1}, ["x"], 10**30)
"""What takes the place of a value."""
DEEP = "[" * 100_000
TEXTS = ("", "{", "null", "[]", "3", '"x"', DEEP, '{"a":' * 5_000, "\x00" * 10, "\udcff")
"""What takes the place of a file."""


def places(value, path=()):
    """All values inside a JSON value, by their keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def damaged(text, choose):
    """A file's text with something else in it."""
    kind = choose.random()
    if kind < 0.1:
        return choose.choice(TEXTS)
    if kind < 0.2:
        at = choose.randrange(len(text))
        return text[:at] + choose.choice(("", "}", '"', "9" * 40, "\n")) + text[at + choose.randrange(9) :]
    value = copy.deepcopy(json.loads(text))
    path = choose.choice([place for place in places(value) if len(place) < 4])
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    if kind < 0.3:
        del holder[path[-1]]
    else:
        holder[path[-1]] = choose.choice(STRANGE)
    return json.dumps(value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model in two files of weights, with a tokenizer and an adapter."""
    # Each time that they are opened is seven forks, one in another.
    use_huge_pages()
    folder = tmp_path_factory.mktemp("whole")
    tokenizer = train_bpe(["some words to learn"] * 3, 270)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "model", max_shard_size="20KB")
    tokenizer.save_pretrained(folder / "model")
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(
        folder / "adapter"
    )
    assert outcome(lambda: open_all(folder)) == "opened"
    return folder


def open_all(folder):
    """What a run does with the files before its first step."""
    name = str(folder / "model")
    adapter = AdapterConfig(type="lora", path=str(folder / "adapter"))
    given = ModelConfig(name=name, init=Init.pretrained, tokenizer=TokenizerConfig(name=name))
    check_adapter(adapter, given)
    model = resolve_model(given, cache_dir=folder / "cache").model
    architecture = find_architecture(model, sequence_length=8)
    load_pretrained_tokenizer(model, cache_dir=folder / "cache")
    build_model(model, architecture, seed=0, trained=TrainableParameters(adapter=adapter))


def outcome(do):
    """Ours, or the library's own exception, seen from a process that may take neither memory nor time without end."""
    try:
        do_apart(do, where="test", found="test")
    except ConfigError as error:
        # A limit of the parts that have none of their own, or a traceback.
        return f"{error.what}" if error.where == "test" else "refused"
    except HfdistError:
        return "refused"
    except OSError as error:
        return f"OSError: {error}"
    return "opened"


TIMES = {
    "model/config.json": 6, "model/generation_config.json": 1, "model/tokenizer.json": 3,
    "model/tokenizer_config.json": 3, "model/model.safetensors.index.json": 3, "adapter/adapter_config.json": 4,
}  # fmt: skip


@pytest.mark.parametrize(("file", "times"), [*TIMES.items(), *(many(file, 100) for file in TIMES)])
def test_a_damaged_file_is_one_message(tmp_path, whole, file, times, monkeypatch):
    # Some values make a library count for ever.
    monkeypatch.setattr(apart, "Limits", functools.partial(apart.Limits, cpu_seconds=3))
    shutil.copytree(whole, tmp_path / "here")
    path, choose, found = tmp_path / "here" / file, random.Random(file), {"refused": 0, "opened": 0}
    text = path.read_text()
    for _ in range(times):
        path.write_text(damaged(text, choose), encoding="utf-8", errors="surrogateescape")
        what = outcome(lambda: open_all(tmp_path / "here"))
        assert what in found, (what, path.read_text(errors="replace")[:600])
        found[what] += 1
    assert found["refused"] or file == "model/generation_config.json"


def test_a_config_of_code_whose_type_is_no_word_is_one_message(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": [], "auto_map": {"AutoConfig": "their.Config"}}')
    with pytest.raises(ConfigError, match="cannot be read"):
        find_architecture(resolve_model(ModelConfig(name=str(tmp_path)), cache_dir=tmp_path).model, sequence_length=8)


def test_a_damaged_gguf_file_is_one_message(tmp_path):
    file, choose = tmp_path / "model.gguf", random.Random(1)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "<s>"])
    writer.add_tensor("token_embd.weight", np.zeros((3, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = file.read_bytes()
    for number in range(16):
        changed = bytearray(content)
        for _ in range(choose.randrange(1, 4)):
            changed[choose.randrange(len(changed) - 64)] = choose.choice((0, 1, 127, 255, choose.randrange(256)))
        file.write_bytes(bytes(changed[: choose.choice((len(changed), len(changed), choose.randrange(len(changed))))]))
        with contextlib.suppress(HfdistError):
            convert_gguf(file, tmp_path / f"cache-{number}", key="model.name")
