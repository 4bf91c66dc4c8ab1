"""Models: architecture and tokenizer fit together, documents do not see each other, FLOPs add up."""

import copy
import shlex

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaForCausalLM

from hfdist.config.model import Dtype, Init, ModelConfig, TokenizerConfig
from hfdist.errors import ConfigError, ResourceError
from hfdist.models import build_model, find_architecture, fit_vocabulary, load_tokenizer
from hfdist.models.build import make_without_values
from hfdist.models.experts import num_chosen_experts, num_experts
from hfdist.models.flops import find_peak_flops, flops_per_token, measure_size, num_parameters
from hfdist.models.frozen import find_frozen
from hfdist.models.initialize import initialize_by_name
from hfdist.models.partitioning import Partitioning
from hfdist.models.probing import class_keeps_documents_apart, keeps_documents_apart, small_model
from hfdist.models.resolve import resolve_model
from hfdist.models.shrink import shrink
from hfdist.models.tokenizer import load_pretrained_tokenizer, train_bpe
from hfdist.trainer.checkpointing.model_files import write_hub_files
from tests.marks import many
from tests.unit.tiny import llama

TEXTS = ["def add(left, right):\n    return left + right\n", "class Empty:\n    pass\n# 12345 größer 漢字\n"] * 20
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 64}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(TEXTS, 300)


def load_architecture(config, tokenizer, *, sequence_length):
    """In the recipe's order, which has the data in between."""
    architecture = find_architecture(config, sequence_length=sequence_length)
    fit_vocabulary(architecture, tokenizer, config)
    return architecture


def random_model(tokenizer, **fields):
    config = ModelConfig(type="llama", config=TINY | fields)
    return build_model(config, load_architecture(config, tokenizer, sequence_length=16), seed=0)


def test_the_part_for_text_has_the_ids_of_the_tokenizer(tokenizer):
    config = ModelConfig(type="gemma3")
    text = load_architecture(config, tokenizer, sequence_length=16).get_text_config()
    # Gemma's own tokenizer pads with 0, which ends a text here: its embedding would get no gradient.
    assert (text.pad_token_id, text.eos_token_id) == (None, tokenizer.eos_token_id)


def test_the_part_for_text_makes_no_cache_which_would_hide_packed_documents(tmp_path, tokenizer):
    architecture = shrink(load_architecture(ModelConfig(type="llama4"), tokenizer, sequence_length=16))
    model = make_without_values(ModelConfig(type="llama4"), architecture)
    initialize_by_name(model, 0)
    tokens, positions = torch.arange(1, 9)[None], torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    changed = torch.where(torch.arange(8) < 4, tokens + 9, tokens)
    before, after = (model(input_ids=ids, position_ids=positions).logits[:, 4:] for ids in (tokens, changed))
    torch.testing.assert_close(before, after)
    write_hub_files(model, None, tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).get_text_config().use_cache


def test_a_generation_config_that_is_refused_without_a_word_is_left_out(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise ValueError

    model = llama()
    monkeypatch.setattr(type(model.generation_config), "save_pretrained", refuse)
    write_hub_files(model, None, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert "generation_config.json is left out: ValueError" in caplog.text


def test_a_type_that_must_have_a_token_is_refused_without_it(tokenizer):
    with pytest.raises(ConfigError, match="have a pad_token_id, and the tokenizer has none"):
        load_architecture(ModelConfig(type="modernbert-decoder"), tokenizer, sequence_length=16)


class TestTokenizer:
    def test_every_text_decodes_to_itself(self, tokenizer):
        for text in (*TEXTS[:2], "\t\x00 unseen: ßøł 🙂\n"):
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    def test_digits_stand_alone(self, tokenizer):
        assert len(tokenizer("12345")["input_ids"]) == 5

    def test_it_is_trained_once_and_its_key_holds_all_that_matters(self, tmp_path):
        calls = []

        def texts(num_bytes):
            calls.append(num_bytes)
            return TEXTS

        def load(vocab_size=300, corpus_id="a"):
            config = ModelConfig(tokenizer=TokenizerConfig(vocab_size=vocab_size, train_bytes=10_000))
            return load_tokenizer(config, corpus_id=corpus_id, texts=texts, cache_dir=tmp_path)

        first, second = load(), load()
        assert calls == [10_000]
        assert first.get_vocab() == second.get_vocab()
        load(vocab_size=290)
        load(corpus_id="b")
        assert len(calls) == 3

    def test_a_missing_one_is_one_message(self, tmp_path):
        config = ModelConfig(tokenizer=TokenizerConfig(name=str(tmp_path / "nothing")))
        with pytest.raises(ConfigError) as caught:
            load_pretrained_tokenizer(config, cache_dir=tmp_path)
        assert caught.value.where == "model.tokenizer.name"


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "tokenizers").write_text("a file in the place of the folder")
    with pytest.raises(ResourceError, match="the cache cannot be written") as caught:
        load_tokenizer(ModelConfig(type="llama"), corpus_id="x", texts=lambda _: TEXTS, cache_dir=tmp_path)
    assert caught.value.where == "data.cache_dir"


class TestArchitecture:
    def test_random_weights_take_the_tokenizers_size_and_ids(self, tokenizer):
        architecture = load_architecture(ModelConfig(type="llama", config=TINY), tokenizer, sequence_length=16)
        assert architecture.vocab_size == len(tokenizer)
        assert architecture.eos_token_id == tokenizer.eos_token_id

    @pytest.mark.parametrize(
        ("fields", "where", "hint"),
        [
            ({"hiden_size": 3}, "model.config.hiden_size", "model.config.hidden_size"),
            ({"hidden_size": "big"}, "model.config.hidden_size", "int"),
            ({"tie_word_embeddings": 1}, "model.config.tie_word_embeddings", "bool"),
            ({"vocab_size": 10}, "model.config.vocab_size", "model.config.vocab_size=300"),
            ({"max_position_embeddings": 8}, "data.sequence_length", "data.sequence_length=8"),
            ({"num_attention_heads": 5}, "model.config", "not a multiple"),
            # No more numbers are tried than models have heads.
            ({"num_attention_heads": 10**12}, "model.config", "model.config.num_attention_heads=32"),
        ],
    )
    def test_mistakes_in_fields(self, tokenizer, fields, where, hint):
        with pytest.raises(ConfigError) as caught:
            load_architecture(ModelConfig(type="llama", config=TINY | fields), tokenizer, sequence_length=16)
        assert caught.value.where == where
        assert hint in str(caught.value)

    def test_a_field_that_only_the_types_code_reads_is_one(self, tokenizer):
        config = ModelConfig(type="qwen3_moe", config=TINY | {"head_dim": 24})
        assert load_architecture(config, tokenizer, sequence_length=16).head_dim == 24

    def test_an_unknown_type_proposes_the_nearest(self, tokenizer):
        with pytest.raises(ConfigError, match="llama"):
            load_architecture(ModelConfig(type="lama"), tokenizer, sequence_length=16)

    # The second reads images, and writes what an encoder has read.
    @pytest.mark.parametrize("kind", ["vit", "florence2"])
    def test_a_model_without_a_causal_head_is_refused(self, tokenizer, tmp_path, kind):
        AutoConfig.for_model(kind).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match="no causal language model"):
            load_architecture(ModelConfig(name=str(tmp_path)), tokenizer, sequence_length=16)

    def test_a_folder_without_a_tokenizer_is_refused(self, tmp_path):
        # transformers makes a tokenizer of it that knows nothing but its special tokens.
        AutoConfig.for_model("gpt2").save_pretrained(tmp_path)
        config = ModelConfig(tokenizer=TokenizerConfig(name=str(tmp_path)))
        with pytest.raises(ConfigError, match="make no tokenizer"):
            load_pretrained_tokenizer(config, cache_dir=tmp_path)

    def test_a_folder_without_a_config_is_named(self, tokenizer, tmp_path):
        with pytest.raises(ConfigError) as caught:
            load_architecture(ModelConfig(name=str(tmp_path)), tokenizer, sequence_length=16)
        assert str(tmp_path) in str(caught.value)
        assert "config.json" in str(caught.value)


class TestPretrained:
    def test_weights_come_from_the_folder_in_float32(self, tokenizer, tmp_path):
        saved = random_model(tokenizer).to(torch.bfloat16)
        saved.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        config = ModelConfig(name=str(tmp_path), init=Init.pretrained, tokenizer=TokenizerConfig(name=str(tmp_path)))
        loaded = build_model(config, load_architecture(config, tokenizer, sequence_length=16), seed=3)
        for (name, ours), theirs in zip(loaded.named_parameters(), saved.parameters(), strict=True):
            assert ours.dtype == torch.float32, name
            assert torch.equal(ours, theirs.float()), name

    def test_pickled_weights_are_refused(self, tokenizer, tmp_path):
        model = random_model(tokenizer)
        model.config.save_pretrained(tmp_path)
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        config = ModelConfig(name=str(tmp_path), init=Init.pretrained)
        with pytest.raises(ConfigError, match=r"model\.name"):
            build_model(config, load_architecture(config, tokenizer, sequence_length=16), seed=0)

    def test_more_tokens_than_embeddings_and_the_command_that_mends_it(self, tokenizer, tmp_path, monkeypatch):
        larger, folder = copy.deepcopy(tokenizer), tmp_path / "it's a model"
        larger.add_tokens(["<extra>", "<more>"])
        random_model(tokenizer).save_pretrained(folder)
        larger.save_pretrained(folder)
        named = {"init": Init.pretrained, "tokenizer": TokenizerConfig(name=str(folder))}
        with pytest.raises(ConfigError) as caught:
            load_architecture(ModelConfig(name=str(folder), **named), larger, sequence_length=16)
        assert "vocab_size" not in str(caught.value)
        words = shlex.split(caught.value.hint)
        assert words[:2] == ["python", "-c"]
        monkeypatch.chdir(tmp_path)
        exec(words[2].removesuffix(","), {})
        resized = ModelConfig(name="resized", **named)
        build_model(resized, load_architecture(resized, larger, sequence_length=16), seed=0)
        smaller = ModelConfig(name=str(folder), config={"vocab_size": 100}, **named)
        with pytest.raises(ConfigError, match=r"without model\.config\.vocab_size"):
            load_architecture(smaller, larger, sequence_length=16)

    def test_the_command_keeps_the_models_head(self, tokenizer):
        architecture = AutoConfig.for_model("t5", vocab_size=100, architectures=["T5ForConditionalGeneration"])
        with pytest.raises(ConfigError, match="import T5ForConditionalGeneration as Model"):
            fit_vocabulary(
                architecture,
                tokenizer,
                ModelConfig(name="t5", init=Init.pretrained, tokenizer=TokenizerConfig(name="t5")),
            )

    def test_dtype_of_the_weights(self, tokenizer):
        config = ModelConfig(type="llama", config=TINY, dtype=Dtype.bfloat16)
        model = build_model(config, load_architecture(config, tokenizer, sequence_length=16), seed=0)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_documents_do_not_see_each_other(tokenizer, attention):
    """Change the first document of a sequence: the second one's logits must not move."""
    model = random_model(tokenizer).eval()
    model.set_attn_implementation(attention)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]])
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    other = ids.clone()
    other[0, :3] = torch.tensor([20, 21, 22])
    with torch.no_grad():
        first = model(input_ids=ids, position_ids=positions).logits
        second = model(input_ids=other, position_ids=positions).logits
        alone = model(input_ids=ids[:, 3:7], position_ids=positions[:, 3:7]).logits
    assert torch.allclose(first[:, 3:], second[:, 3:], atol=1e-6)
    assert not torch.allclose(first[:, :3], second[:, :3], atol=1e-3)
    assert torch.allclose(first[:, 3:7], alone, atol=1e-5)


def test_a_name_that_no_file_can_have_is_refused_as_any_other(tmp_path):
    name = "x" * 300
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_model(ModelConfig(name=f"./{name}"), cache_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        find_architecture(ModelConfig(name=f"./{name}", trust_remote_code=True), sequence_length=16)
    with pytest.raises(ConfigError, match="holds no such model"):
        find_frozen(name, where="task.teacher", allowed="a folder", hint="task.teacher=FOLDER")


class PartitionedWhileMade(Partitioning):
    """As ZeRO-3 is, to one that asks before anything is made."""

    partitions_in_constructor = True


def test_weights_that_are_turned_by_shapes_are_not_read_under_zero3(tmp_path):
    """Those of square experts would be turned without a word."""
    config, layout = ModelConfig(name=str(tmp_path), init=Init.pretrained), PartitionedWhileMade()
    with pytest.raises(ConfigError, match="by the shapes of parameters") as refused:
        build_model(config, AutoConfig.for_model("qwen3_vl_moe"), seed=0, layout=layout)
    assert refused.value.hint == "strategy=fsdp2"
    with pytest.raises(ConfigError, match="cannot be read") as refused:
        build_model(config, llama().config, seed=0, layout=layout)
    assert refused.value.hint.startswith("strategy=fsdp2, if it works there")


def test_models_are_asked_whether_they_keep_documents_apart(tokenizer):
    assert keeps_documents_apart(random_model(tokenizer)) is True
    mamba = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=4)
    assert keeps_documents_apart(AutoModelForCausalLM.from_config(mamba)) is not True


def test_a_class_that_refuses_positions_in_its_own_way_cannot_be_asked():
    class WithoutPositions(LlamaForCausalLM):
        def forward(self, input_ids=None, position_ids=None, **more):
            assert position_ids is None
            return super().forward(input_ids=input_ids, **more)

    assert keeps_documents_apart(WithoutPositions(llama().config)) is None


def test_small_models_are_the_same_whatever_was_drawn_before():
    model = llama()
    first, second = small_model(model), small_model(model)
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), second.parameters(), strict=True))


def test_a_rank_with_a_part_of_the_blocks_knows_it_too():
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma2", vocab_size=64, **sizes))
    for module in model.model.layers[0].modules():
        module._parameters = dict.fromkeys(module._parameters)
    state = torch.get_rng_state()
    assert class_keeps_documents_apart(model) is True
    assert torch.equal(torch.get_rng_state(), state)


def flops_of(model):
    return flops_per_token(model.config, measure_size(model), 16)


def test_flops_of_a_token(tokenizer):
    model = random_model(tokenizer, tie_word_embeddings=True)
    # 6 a multiplying parameter, 12 * blocks * heads * head size * tokens for attention.
    assert flops_of(model) == 6 * num_parameters(model) + 12 * 3 * 2 * 16 * 16
    untied = random_model(tokenizer, tie_word_embeddings=False)
    assert flops_of(untied) == flops_of(model)


def forward_flops(model, **shapes):
    inputs = {name: torch.ones(1, size, dtype=torch.long) for name, size in shapes.items()}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs, use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", ["jetmoe", many("mixtral"), many("longcat_flash")])
def test_a_forward_multiplies_the_parameters_that_count_as_active(kind):
    config = shrink(AutoConfig.for_model(kind))
    config._attn_implementation = config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    few, more = forward_flops(model, input_ids=16), forward_flops(model, input_ids=32)
    # Without attention, which grows with the square.
    linear = few / 16 - (more - 2 * few) / (2 * 16)
    assert measure_size(model).num_multiplying == pytest.approx(linear / 2, rel=0.05)


@pytest.mark.parametrize("kind", ["t5", many("bart"), many("marian"), many("pegasus")])
def test_tokens_of_sources_and_targets_multiply_the_weights_of_their_side(kind):
    config = shrink(AutoConfig.for_model(kind), num_blocks=2)
    config._attn_implementation = "eager"
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    source, target = 24, 5
    counted = flops_per_token(model.config, measure_size(model), source, target) * (source + target)
    used = forward_flops(model, input_ids=source, decoder_input_ids=target)
    assert counted == pytest.approx(3 * used, rel=0.06)


def test_no_token_multiplies_the_tables_of_positions_or_a_pooler():
    model = AutoModel.from_config(shrink(AutoConfig.for_model("bert"), num_blocks=2))
    used = num_parameters(model.encoder) + num_parameters(model.embeddings.LayerNorm)
    assert measure_size(model).num_multiplying == used
    assert num_parameters(model.pooler) > 0


def test_a_token_costs_only_the_experts_that_are_chosen_for_it():
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("qwen3_moe", vocab_size=64, num_experts=8, num_experts_per_tok=2, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    size = measure_size(model)
    # Gate, up and down of six experts in each of two blocks, and the input embedding.
    assert size.num_multiplying == size.num_parameters - 2 * 6 * 3 * 32 * 16 - 64 * 32


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("gemma4_text", {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2}),
        ("dbrx", {"ffn_config": {"moe_num_experts": 8, "moe_top_k": 2}}),
    ],
)
def test_experts_are_counted_by_the_names_of_their_fields(model_type, fields):
    config = AutoConfig.for_model(model_type, **fields)
    assert (num_experts(config), num_chosen_experts(config)) == (8, 2)


# In TFLOP/s, dense bf16 (fp16 where there is no bf16), by the names of torch.cuda.get_device_name.
PEAKS = {
    2500: "NVIDIA GB200",
    989: "NVIDIA GH200 480GB, NVIDIA H200, NVIDIA H100 80GB HBM3, NVIDIA H800",
    835: "NVIDIA H200 NVL, NVIDIA H100 NVL",
    756: "NVIDIA H100 PCIe",
    148: "NVIDIA H20",
    312: "NVIDIA A100-SXM4-40GB, NVIDIA A100 80GB PCIe, A100-SXM4-40GB",
    125: "NVIDIA A10, Tesla V100-SXM2-16GB",
    70: "NVIDIA A10G",
    165: "NVIDIA A30, NVIDIA GeForce RTX 4090",
    147: "NVIDIA GeForce RTX 4090 D",
    1307: "AMD Instinct MI300X",
    # Parts and slower kinds of those, and others.
    None: (
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb, NVIDIA H100 80GB HBM3 MIG 2g.20gb, GRID A100-10C, NVIDIA A40-48Q, "
        "NVIDIA GeForce RTX 4090 Laptop GPU, NVIDIA RTX A4000, Quadro RTX 6000, AMD Radeon Graphics"
    ),
}


@pytest.mark.parametrize(("tflops", "names"), PEAKS.items())
def test_a_device_has_the_peak_of_its_whole_name(tflops, names):
    for name in names.split(", "):
        assert find_peak_flops(name) == (tflops and tflops * 1e12), name
