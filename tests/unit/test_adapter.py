"""Adapters: checked against PEFT, put into a model, kept under PEFT's names; and freezing by name."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from peft import (
    AdaLoraConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    TrainableTokensConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from hfdist.checkpoint import read_checkpoint
from hfdist.config.composition.compose import compose_config
from hfdist.errors import CheckpointError, ConfigError
from hfdist.models import TrainableParameters, build_model, find_architecture
from hfdist.models.adapter import check_adapted, wrap_model
from hfdist.models.partitioning import Partitioning
from hfdist.models.peft_config import check_adapter, reads_weights
from hfdist.models.trainable import freeze_by_name
from hfdist.run.parts.sample import SamplePart, _find_question
from hfdist.strategies.pieces import list_pieces
from hfdist.trainer.checkpointing.adapter_files import adapter_pieces, check_adapter_names, write_adapter_config
from tests.unit.pipeline import toys
from tests.unit.pipeline.toys import make_toy
from tests.unit.tiny import llama

SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = torch.arange(20)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    llama(**SMALL).save_pretrained(folder)
    return folder


def compose(base, *overrides):
    return compose_config(["model=hub", f"model.name={base}", *overrides])


def build(base, *overrides, seed=0):
    config = compose(base, *overrides)
    check_adapter(config.adapter, config.model)
    architecture = find_architecture(config.model, sequence_length=64)
    return build_model(config.model, architecture, seed=seed, trained=TrainableParameters.of(config))


def trained_names(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def save_adapter(model, folder):
    """As an export does, in one process."""
    folder.mkdir()
    pieces = adapter_pieces(model, list_pieces(model, None))
    save_file({piece.name: piece.view.contiguous() for piece in pieces}, folder / "adapter_model.safetensors")
    write_adapter_config(model, folder)


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def shake(model):
    """Give what is trained other values, as training would."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)


TYPES = {
    "lora": (),
    "lora with dora": ("adapter.dora=true",),
    "lora with biases": ("+adapter.arguments.bias=lora_only",),
    "lora on the embedding": ("adapter.targets=[q_proj,embed_tokens]",),
    "lora from principal components": ("adapter.rank=4", "+adapter.arguments.init_lora_weights=pissa"),
    "lora and a head": ("adapter.modules_to_save=[lm_head]",),
    "loha": ("adapter.rank=2", "adapter.alpha=4", "adapter.dropout=0.5"),
    "lokr": (),
    "ia3": (),
    "hra": (),
    "boft": (),
    "delora": (),
    "ln_tuning": (),
    "miss": ("adapter.rank=8",),
    "trainable_tokens": ("adapter.targets=[embed_tokens]", "+adapter.arguments.token_indices=[1,2,3]"),
    "road": ("+adapter.arguments.group_size=16",),
}


@pytest.mark.parametrize("name", TYPES)
def test_what_is_kept_opens_in_peft_and_gives_the_same(base, tmp_path, name):
    if name == "lora with biases":
        base = tmp_path / "base"
        llama(**SMALL, attention_bias=True).save_pretrained(base)
    model = build(base, f"adapter.type={name.split()[0]}", *TYPES[name])
    shake(model)
    save_adapter(model, tmp_path / "adapter")
    whole = AutoModelForCausalLM.from_pretrained(base)
    before = logits(whole)
    opened = PeftModel.from_pretrained(whole, tmp_path / "adapter")
    assert torch.allclose(logits(opened), logits(model), atol=1e-6)
    assert not torch.allclose(before, logits(model), atol=1e-4)


def test_a_saved_adapter_goes_on(base, tmp_path):
    first = build(base, "adapter=lora", "adapter.rank=3", "adapter.modules_to_save=[lm_head]")
    shake(first)
    save_adapter(first, tmp_path / "adapter")
    second = build(base, f"adapter.path={tmp_path / 'adapter'}")
    assert torch.equal(logits(first), logits(second))
    assert trained_names(first) == trained_names(second)


def test_a_saved_adapter_goes_on_in_a_model_with_buffers(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "minimax_m2",
        vocab_size=32,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        **sizes,
    )
    model = AutoModelForCausalLM.from_config(config)
    assert any("e_score_correction_bias" in name for name, _ in model.named_buffers())
    model.save_pretrained(tmp_path / "base")
    first = build(tmp_path / "base", "adapter=lora", "adapter.targets=[q_proj]")
    shake(first)
    save_adapter(first, tmp_path / "adapter")
    second = build(tmp_path / "base", f"adapter.path={tmp_path / 'adapter'}")
    assert torch.equal(logits(first), logits(second))


def test_an_adapter_that_is_not_merged_writes_a_sample(base, tmp_path, caplog):
    """Its folder has no config of the model, and names the base."""
    model = build(base, "adapter=lora")
    save_adapter(model, tmp_path / "adapter")
    config = compose(base, "adapter=lora", "adapter.merge=false", "report.sample_prompt=a", "report.sample_tokens=3")
    words = Tokenizer(WordLevel({"</s>": 0, "a": 1}, unk_token="a"))
    words.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    run = SimpleNamespace(
        config=config,
        budget=SimpleNamespace(stopped_by=None),
        data=SimpleNamespace(tokenizer=tokenizer),
        model=model,
        outcome=SimpleNamespace(folder=tmp_path / "adapter"),
        trainer=SimpleNamespace(args=None, strategy=SimpleNamespace(without_partitioning=nullcontext)),
    )
    with caplog.at_level(logging.INFO, logger="hfdist"):
        SamplePart().finish(run)
    assert f"{tmp_path / 'adapter'} continues 'a':\n" in caplog.text
    assert _find_question(run).prompt == [1], "nothing comes after the end of a text"


def test_the_same_seed_gives_the_same_adapter_and_another_another(base):
    def drawn(seed):
        model = build(base, "adapter=lora", seed=seed)
        return {name: parameter for name, parameter in model.named_parameters() if "lora_A" in name}

    first, again, other = drawn(0), drawn(0), drawn(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_an_adapter_stays_in_float32_over_a_model_in_half_precision(base):
    model = build(base, "adapter=lora", "model.dtype=bfloat16")
    types = {parameter.requires_grad: parameter.dtype for parameter in model.parameters()}
    assert types == {True: torch.float32, False: torch.bfloat16}


def test_what_peft_would_not_keep_is_not_trained_silently(base):
    model = build(base, "adapter=lora")
    model.model.norm.weight.requires_grad_(True)
    with pytest.raises(CheckpointError, match=r"no part of the adapter"):
        list(adapter_pieces(model, list_pieces(model, None)))


class Layout(Partitioning):
    """A layout of which ranks have parts of weights."""

    @property
    def sharing_keys(self):
        return "strategy.sharding=zero3"


def given(config, name="default", **fields):
    torch.manual_seed(0)
    return get_peft_model(llama(**SMALL, **fields), config, adapter_name=name)


def lora(**fields):
    return LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **fields)


ADALORA = AdaLoraConfig(init_r=6, target_r=4, total_step=10, target_modules=["q_proj"])
GIVEN = {
    "it learns a prompt": lambda: given(PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")),
    "one of its first tokens": lambda: given(PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")),
    "between steps": lambda: given(ADALORA),
    "share weights": lambda: given(VeraConfig(r=8, target_modules=["q_proj", "o_proj"])),
    "under PEFT's own first name": lambda: given(lora(), "mine"),
    "share the model's weights": lambda: given(lora(layer_replication=[(0, 2), (1, 2)])),
    "inputs of the whole model": lambda: given(lora(alora_invocation_tokens=[1, 2])),
    "one weight": lambda: given(LoraConfig(target_modules=["embed_tokens"]), tie_word_embeddings=True),
}


@pytest.mark.parametrize("said", GIVEN)
def test_a_given_adapter_that_would_train_otherwise_is_refused_as_in_recipes(said):
    model = GIVEN[said]()
    with pytest.raises(ConfigError, match=said if "first tokens" not in said else "learns a prompt"):
        check_adapted(model, Partitioning(), where="peft_config")


def test_two_adapters_at_once_are_refused():
    model = given(lora())
    model.add_adapter("second", lora())
    check_adapted(model, Partitioning(), where="peft_config")
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ConfigError, match="one adapter is trained"):
        check_adapted(model, Partitioning(), where="peft_config")


def test_trained_tokens_need_whole_embeddings(base):
    """Whether they are given with a model, as a config, or by the keys."""
    for config in (lora(trainable_token_indices=[1, 2]), TrainableTokensConfig(token_indices=[1, 2])):
        check_adapted(given(config), Partitioning(), where="peft_config")
        for check in (
            lambda config=config: check_adapted(given(config), Layout(), where="peft_config"),
            lambda config=config: wrap_model(llama(**SMALL), config, seed=0, layout=Layout()),
        ):
            with pytest.raises(ConfigError, match=r"(?s)token_indices.*strategy\.sharding=zero3"):
                check()
    for words in (("adapter=lora", "+adapter.arguments.trainable_token_indices=[1,2]"), TYPES["trainable_tokens"]):
        words = words if "adapter=lora" in words else ("adapter.type=trainable_tokens", *words)
        config = compose(base, *words)
        with pytest.raises(ConfigError, match="whole embedding"):
            check_adapter(config.adapter, config.model, Layout())


def test_what_a_save_would_hold_is_named_before_the_first_step(monkeypatch):
    model = given(lora(trainable_token_indices=[1, 2], bias="lora_only", modules_to_save=["lm_head"]))
    check_adapter_names(model)
    model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"no part of the adapter"):
        check_adapter_names(model)

    def fail(*_, **__):
        raise KeyError("trainable_tokens_delta")

    monkeypatch.setattr("peft.get_peft_model_state_dict", fail)
    with pytest.raises(ConfigError, match="trainable_tokens_delta"):
        check_adapter_names(model)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_embeddings_of_another_size_are_kept_with_the_adapter(tmp_path, is_wrapped, is_tied):
    llama(**SMALL, tie_word_embeddings=is_tied).save_pretrained(tmp_path / "base")

    def opened():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        model.resize_token_embeddings(72, mean_resizing=False)
        return model

    model = opened()
    config = lora()
    wrapped = get_peft_model(model, config)
    model = wrapped if is_wrapped else model
    config.base_model_name_or_path = str(tmp_path / "base")
    shake(model)
    save_adapter(model, tmp_path / "adapter")
    again = PeftModel.from_pretrained(opened(), tmp_path / "adapter")
    last = torch.arange(52, 72)[None]
    with torch.no_grad():
        assert torch.equal(again.eval()(last).logits, model.eval()(last).logits)


def test_a_whole_model_is_not_read_as_an_adapter(base, tmp_path):
    with pytest.raises(CheckpointError):
        read_checkpoint(base, adapter_pieces(build(base, "adapter=lora"), []))


def test_only_weights_that_are_read_must_be_there_in_their_type(base):
    def reads(*overrides):
        return reads_weights(compose(base, *overrides).adapter)

    assert not reads()
    assert not reads("adapter=lora")
    assert reads("adapter=dora")
    assert reads("adapter=lora", "+adapter.arguments.init_lora_weights=pissa")


@pytest.mark.parametrize(
    ("overrides", "where", "said"),
    [
        (["adapter.type=lorra"], "adapter.type", "adapter.type=lora"),
        (["adapter.type=adalora"], "adapter.type", "between steps"),
        (["adapter.type=prefix_tuning"], "adapter.type", "it learns a prompt"),
        (["adapter.type=adaption_prompt"], "adapter.type", "it learns a prompt"),
        (["adapter.type=vera"], "adapter.type", "share weights"),
        (["adapter.type=randlora"], "adapter.type", "share weights"),
        (["adapter.type=ia3", "adapter.rank=4"], "adapter.rank", "nothing of the kind"),
        (["adapter=lora", "+adapter.arguments.lora_bais=true"], "adapter.arguments.lora_bais", "lora_bias"),
        (["adapter=lora", "+adapter.arguments.r=4"], "adapter.arguments.r", "adapter=lora adapter.rank=4"),
        (["adapter.type=BOFT", "+adapter.arguments.boft_dropout=0.1"], "adapter.arguments.boft", "set adapter.dropout"),
        (["adapter=lora", "+adapter.arguments.init_lora_weights=eva"], "adapter.arguments.init_lora_weights", "pissa"),
        (["adapter=lora", "+adapter.arguments.bias=some"], "adapter.*", "PEFT refuses"),
        (["adapter=lora", "adapter.targets=[q_prj]"], "adapter.targets", "adapter.targets=[q_proj]"),
        (["adapter=lora", "adapter.targets=[q_proj,nothing]"], "adapter.targets", "gate_proj"),
        (["adapter=lora", "adapter.target_pattern='.*attn'"], "adapter.*", "PEFT refuses"),
        (["adapter=lora", "adapter.target_pattern=attn"], "adapter.target_pattern", "no layer of this name"),
        (["adapter=lora", "adapter.target_pattern=q_prj"], "adapter.target_pattern", """target_pattern=".*q_proj"'"""),
        (["adapter=lora", "adapter.target_pattern='('"], "adapter.target_pattern", "not a regular expression"),
        (["adapter=lora", "adapter.modules_to_save=[head]"], "adapter.modules_to_save", "no layer of this name"),
        (["adapter=lora", "adapter.targets=[]"], "adapter.targets", "no layer"),
        (["adapter=lora", "adapter.targets=[all-linear,q_proj]"], "adapter.targets", "no name goes with it"),
        (["adapter=lora", "adapter.targets=[q_proj]", "adapter.target_pattern=x"], "adapter.targets", "given twice"),
        (["adapter.rank=4"], "adapter.rank", "adapter=lora"),
        (["adapter.path=/none/such"], "adapter.path", "/none/such"),
        (["adapter=lora", "adapter.path=/none/such"], "adapter.type", "has its own value"),
        (["adapter=lora", "model.init=random"], "adapter.merge", "these are random"),
        (["train.freeze=['model.layers.0']"], "train.freeze", "train.freeze=['model.layers.0.*']"),
        (["train.train_only=['model.embed.*']"], "train.train_only", "model.embed_tokens.weight"),
        (["train.freeze=['*']"], "train.freeze, train.train_only", "nothing is left"),
        (["adapter=lora", "train.freeze=['*lora*']"], "train.freeze, train.train_only", "nothing is left"),
    ],
)
def test_a_mistake_is_told_with_its_key_and_the_next_move(base, overrides, where, said):
    with pytest.raises(ConfigError) as caught:
        build(base, *overrides)
    assert str(caught.value.where).startswith(where)
    assert said in str(caught.value)


def test_quantized_weights_are_refused(base):
    config = compose(base, "adapter=lora")
    architecture = find_architecture(config.model, sequence_length=64)
    architecture.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(ConfigError, match="quantized"):
        build_model(config.model, architecture, seed=0, trained=TrainableParameters.of(config))


def test_an_adapter_on_one_of_two_tied_layers_is_refused(tmp_path):
    torch.manual_seed(0)
    llama(**SMALL, tie_word_embeddings=True).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="one weight"):
        build(tmp_path, "adapter=lora", "adapter.targets=[q_proj,lm_head]")


def test_a_model_whose_embedding_is_not_known_is_adapted():
    wrapped = wrap_model(make_toy(toys.Unnamed), LoraConfig(target_modules=["linear"]), seed=0, layout=Partitioning())
    check_adapted(wrapped, Partitioning(), where="peft_config")
    assert any(name.endswith("lora_A.default.weight") for name, _ in wrapped.named_parameters())


def test_patterns_choose_what_is_trained(base):
    model = llama(**SMALL)
    freeze_by_name(model, freeze=["*.mlp.*"], train_only=["model.layers.1.*", "lm_head.weight"])
    trained = trained_names(model)
    assert "lm_head.weight" in trained
    assert "model.layers.1.self_attn.q_proj.weight" in trained
    assert not any("mlp" in name or "layers.0" in name or "embed" in name for name in trained)


@pytest.mark.parametrize("pattern", ["lm_head.*", "model.embed_tokens.*"])
def test_tied_weights_are_frozen_together_and_it_is_said(caplog, pattern):
    model = llama(**SMALL, tie_word_embeddings=True)
    with caplog.at_level(logging.INFO):
        freeze_by_name(model, freeze=[pattern], train_only=[])
    assert not model.lm_head.weight.requires_grad
    assert not model.model.embed_tokens.weight.requires_grad
    assert "the same weight" in caplog.text
