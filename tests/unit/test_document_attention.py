"""Attention document by document beside the same with a mask, and what is asked before it is chosen."""

from importlib import import_module

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward

from hfdist.config.composition.compose import compose_config
from hfdist.config.train import Recompute
from hfdist.errors import ConfigError
from hfdist.models import attention_choice, document_attention, find_architecture
from hfdist.models.attention_choice import choose_attention, find_by_documents
from hfdist.models.document_attention import BY_DOCUMENTS
from hfdist.models.recompute import checkpoint_blocks
from tests.zoo.models import tiny_config, tiny_model

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64}  # fmt: skip
ROWS = {"rows": ((5, 1, 18), (24,), (12, 12)), "one row": ((7, 9, 8),), "single tokens": ((1,) * 24,)}
PACKED = torch.tensor([[*range(9), *range(1), *range(14)], [*range(20), *range(4)]])
IDS = torch.arange(48).view(2, 24)
EAGER = {"sinks": (GptOssAttention, GptOssConfig), "soft caps": (Gemma2Attention, Gemma2Config)}


def mask_of(name, rows, window, dtype=torch.float32):
    documents = torch.tensor([[n for n, length in enumerate(row) for _ in range(length)] for row in rows])
    base = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    function = and_masks(base, packed_sequence_mask_function(documents))
    more = {"mask_function": function, "local_size": window, "allow_is_causal_skip": False, "dtype": dtype}
    return ALL_MASK_ATTENTION_FUNCTIONS[name](batch_size=len(rows), q_length=24, kv_length=24, **more)


def attended(name, module, eager, states, mask, **more):
    states = [state.clone().requires_grad_() for state in states]
    module.zero_grad()
    # By keyword, as some models have it.
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    output = attend(module, *states, attention_mask=mask, scaling=0.3, dropout=0.0, **more)[0]
    (output * torch.arange(output.numel()).view(output.shape).cos()).sum().backward()
    own = [p.grad for p in module.parameters() if p.grad is not None]
    return [output.detach(), *(state.grad for state in states), *own]


def assert_equal(found, wanted):
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("kind", ["sdpa", "position bias", *EAGER])
@pytest.mark.parametrize("window", [None, 6, 2, 100])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_documents_one_by_one_are_those_of_a_mask(rows, window, kind):
    torch.manual_seed(0)
    beneath = "eager" if kind in EAGER else "sdpa"
    module_class, config_class = EAGER.get(kind, (LlamaAttention, LlamaConfig))
    module = module_class(config_class(**SIZES), 0).eval()
    eager = import_module(module_class.__module__).eager_attention_forward
    more = {"softcap": 1.5} if kind == "soft caps" else {"s_aux": module.sinks} if kind == "sinks" else {}
    if kind == "position bias":
        more = {"position_bias": torch.randn(len(rows), 4, 24, 24)}
    if kind == "sinks":
        torch.nn.init.normal_(module.sinks)
    # Values of another size, as latent attention has.
    states = [torch.randn(len(rows), heads, 24, size) for heads, size in ((4, 16), (2, 16), (2, 8))]
    name, borders = BY_DOCUMENTS[beneath], mask_of(BY_DOCUMENTS[beneath], rows, window)
    assert borders.dtype is torch.int32
    assert borders.shape[-1] == sum(map(len, rows)) + 1
    assert borders.untyped_storage().nbytes() == 4 * borders.shape[-1]
    wanted = attended(beneath, module, eager, states, mask_of(beneath, rows, window), **dict(more))
    assert_equal(attended(name, module, eager, states, borders, **dict(more)), wanted)


def llama(attention, **more):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation=attention, **more))


def test_sequences_of_one_document_and_generation_are_those_of_sdpa(monkeypatch):
    def refuse(*_):
        raise AssertionError("there are no documents")

    ours, theirs = llama("varlen"), llama("sdpa")
    padded = torch.ones_like(IDS)
    padded[0, :5] = 0
    monkeypatch.setattr(document_attention, "_one_by_one", refuse)
    positions = torch.arange(24).expand(2, -1)
    for more in ({}, {"position_ids": positions}, {"attention_mask": padded}, {"use_cache": True}):
        assert torch.equal(ours(input_ids=IDS, **more).logits, theirs(input_ids=IDS, **more).logits)
    how = {"attention_mask": padded, "max_new_tokens": 5, "do_sample": False}
    for cache in ("dynamic", "static"):
        answers = [model.generate(IDS, cache_implementation=cache, **how) for model in (ours, theirs)]
        assert torch.equal(*answers)
    with pytest.raises(AssertionError, match="no documents"):
        ours(input_ids=IDS, position_ids=PACKED, use_cache=False)


def test_tensors_without_values_have_a_mask():
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = llama("varlen")
        fake = torch.zeros(2, 24, dtype=torch.int64)
        assert model(input_ids=fake, position_ids=fake, use_cache=False).logits.shape == (2, 24, 64)


def test_a_saved_model_does_not_name_it(tmp_path):
    llama("varlen").save_pretrained(tmp_path)
    assert "varlen" not in (tmp_path / "config.json").read_text()
    assert LlamaForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("recompute", Recompute)
def test_blocks_are_computed_again(recompute):
    def gradients(model):
        model.train()(input_ids=IDS, labels=IDS, position_ids=PACKED, use_cache=False).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    model = llama("varlen")
    checkpoint_blocks(model, recompute)
    assert_equal(gradients(model), gradients(llama("sdpa")))


def test_16_bits_on_a_cpu_take_a_call_each():
    states = [torch.randn(1, 2, 24, 16, dtype=torch.bfloat16) for _ in range(3)]
    module = LlamaAttention(LlamaConfig(**SIZES | {"num_key_value_heads": 4}), 0)
    found = attended("varlen", module, eager_attention_forward, states, mask_of("varlen", ROWS["one row"], None))
    assert found[0].dtype is torch.bfloat16


@pytest.mark.parametrize(
    "called", [{}, {"window": 6}, {"value": 8}], ids=["plain", "a window", "values of another size"]
)
def test_the_kernel_of_a_gpu_is_given_what_it_asks_for(monkeypatch, called):
    """Stands in for it by what its documentation says; on a CPU it does not run."""

    def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
        assert key.shape[1:] == value.shape[1:] == (2, query.shape[2])
        assert enable_gqa
        assert max_q == max_k >= int(cu_seq_k.diff().max())
        before, behind = window_size
        assert behind == 0
        place = torch.arange(len(query))
        number, distance = torch.bucketize(place, cu_seq_q[1:], right=True), place[:, None] - place
        sees = (number[:, None] == number) & (distance >= 0) & ((distance <= before) | (before < 0))
        states = (state.transpose(0, 1)[None] for state in (query, key, value))
        function = torch.nn.functional.scaled_dot_product_attention
        return function(*states, attn_mask=sees, scale=scale, enable_gqa=True)[0].transpose(0, 1)

    monkeypatch.setattr(document_attention, "varlen_attn", kernel)
    assert document_attention._differ_by_kernel(torch.device("cpu")) < 0.02
    monkeypatch.setattr(document_attention, "_fits_kernel", lambda *_: True)
    module, size, window = LlamaAttention(LlamaConfig(**SIZES), 0), called.get("value", 16), called.get("window")
    states = [torch.randn(3, heads, 24, size) for heads, size in ((4, 16), (2, 16), (2, size))]
    masks = [mask_of(name, ROWS["rows"], window) for name in ("varlen", "sdpa")]
    found, wanted = (
        attended(name, module, None, states, mask) for name, mask in zip(("varlen", "sdpa"), masks, strict=True)
    )
    assert_equal(found, wanted)


def test_a_kernel_that_does_not_run_or_differs_is_not_taken(monkeypatch, caplog):
    device = torch.device("cpu", 0)
    monkeypatch.setattr(document_attention, "_KERNEL_WORKS", {})
    document_attention._try_kernel(device)

    def without_numbers(query, key, value, *_, **__):
        return (query + (key + value).repeat_interleave(2, 1)) * torch.nan

    monkeypatch.setattr(document_attention, "varlen_attn", without_numbers)
    document_attention._try_kernel(torch.device("cpu", 1))
    monkeypatch.setattr(document_attention, "_differ_by_kernel", lambda _: 0.5)
    document_attention._try_kernel(torch.device("cpu", 2))
    assert document_attention._KERNEL_WORKS == {0: False, 1: False, 2: False}
    assert "differs by nan" in caplog.text
    assert "differs by 5e-01" in caplog.text
    assert len(caplog.records) == 3


def test_compiled_blocks_hold_the_kernel_without_a_break(monkeypatch):
    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    monkeypatch.setattr(document_attention, "_fits_kernel", lambda *_: True)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16().model
        model.set_attn_implementation("varlen")
        hidden = torch.zeros(1, 24, 64, dtype=torch.bfloat16)
        waves = model.rotary_emb(hidden, torch.arange(24)[None])
    model.layers[0].compile(backend=backend, fullgraph=True)
    for count in (3, 4, 5, 6):
        borders = torch.zeros(count, dtype=torch.int32, device="meta")
        model.layers[0](hidden, attention_mask=borders, position_embeddings=waves)
    # One for the first number of documents, one for any.
    assert len(graphs) == 2
    assert all("torch_attn._varlen_attn" in names for names in graphs)


# ---- whether it is chosen ----

BY_TYPE = {
    "llama": "varlen",
    "gpt2": "varlen",
    "mistral": "varlen",
    "gemma3_text": "varlen",
    "qwen3_moe": "varlen",
    "deepseek_v3": "varlen",
    "llama4_text": "varlen",
    "phimoe": "varlen",
    "gemma2": "varlen_eager",
    "doge": "a small model cannot be tried so",
    "gpt_oss": "the model looks for no documents",
    "bloom": "the model has no attention that",
    "gpt_neo": "the model has no attention that",
}


@pytest.mark.parametrize("model_type", BY_TYPE)
def test_a_small_model_is_asked(model_type):
    architecture = tiny_config(model_type)
    architecture._attn_implementation = None
    state = torch.get_rng_state()
    found = find_by_documents(architecture)
    assert any(str(said).startswith(BY_TYPE[model_type]) for said in found)
    assert torch.equal(torch.get_rng_state(), state)
    assert architecture._attn_implementation is None


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma2", "qwen3_moe"])
def test_whole_models_train_alike(model_type):
    def gradients(attention):
        model = tiny_model(model_type, 2, attention=attention)
        logits = model(input_ids=IDS, position_ids=PACKED, use_cache=False).logits
        logits.square().sum().backward()
        return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    beneath = "eager" if model_type == "gemma2" else "sdpa"
    assert_equal(gradients(BY_DOCUMENTS[beneath]), gradients("eager"))


def test_what_differs_is_not_chosen(monkeypatch):
    """A window that is not heeded."""
    whole = document_attention._mask_of_document
    monkeypatch.setattr(document_attention, "_mask_of_document", lambda beneath, query, _: whole(beneath, query, None))
    architecture = tiny_config("mistral")
    architecture._attn_implementation = None
    name, reason = find_by_documents(architecture)
    assert name is None
    assert reason.startswith("a small model differs by")


def chosen(*overrides, device_type="cpu"):
    config = compose_config(["model=tiny", "data.sequence_length=256", *overrides])
    architecture = find_architecture(config.model, sequence_length=64)
    return choose_attention(config, architecture, device_type), architecture._attn_implementation


def test_runs_of_packed_documents_choose_it():
    assert chosen() == (None, "varlen")
    assert chosen("data.packing=none") == (None, None)
    assert chosen("data.sequence_length=255") == (None, None)
    assert chosen("model.attention=sdpa") == (None, "sdpa")
    assert chosen("data.packing=none", "model.attention=varlen") == (None, "varlen")


def test_compiled_blocks_have_it_only_in_one_call():
    reason, name = chosen("train.compile=blocks")
    assert name is None
    assert "16 bits" in reason
    assert chosen("train.compile=blocks", "train.precision=bf16", device_type="cuda") == (None, "varlen")
    assert chosen(device_type="cuda")[1] is None
    assert chosen("train.compile=none", device_type="cuda") == (None, "varlen")
    for layout in ("tensor", "zero3"):
        # Nothing is compiled there.
        assert chosen(f"strategy={layout}", device_type="cuda") == (None, "varlen")
    assert chosen("train.compile=model")[1] is None
    half = ("train.compile=blocks", "train.precision=bf16")
    for more in ("model.config.head_dim=12", "+model.config.attention_dropout=0.1"):
        assert chosen(*half, more, device_type="cuda")[1] is None


def test_ranks_that_gather_keep_the_mask():
    heads = ("model.config.num_attention_heads=6", "model.config.num_key_value_heads=3", "model.config.hidden_size=96")
    reason, name = chosen("strategy=long_context", "strategy.context=2", *heads)
    assert (name, "gather" in reason) == (None, True)
    assert chosen("strategy=long_context", "strategy.context=2") == (None, "varlen")


def test_what_cannot_be_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"document by document"):
        chosen("model.attention=varlen", "train.compile=blocks")
    why = (None, "a small model differs by 1e-01")
    monkeypatch.setattr(attention_choice, "find_by_documents", lambda *_, **__: why)
    with pytest.raises(ConfigError, match="differs") as caught:
        chosen("model.attention=varlen")
    assert caught.value.where == "model.attention"
    assert chosen() == (why[1], None)
