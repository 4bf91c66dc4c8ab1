"""Adapters and frozen parameters train in every layout as in one process, and what they leave opens in PEFT."""

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainingArguments

import hfdist
from hfdist.config.composition.compose import compose_config
from hfdist.config.train import Precision
from hfdist.models import TrainableParameters, build_model, find_architecture
from hfdist.models.packed_weights import packed_shapes
from hfdist.planning.tracing.memory import trace_rank
from hfdist.strategies.engine import Engine
from hfdist.strategies.from_python import make_strategy
from hfdist.strategies.gradients.reduction import local_tensor
from hfdist.testing import forget_parent, run_ranks
from hfdist.verify.certificate import BOUNDS
from hfdist.verify.compare_runs import compare_runs
from tests.distributed.runs import eval_losses, losses, pretrain
from tests.marks import chosen, many

pytestmark = pytest.mark.distributed

NUM_STEPS = 3
SHORT = (
    "data.sequence_length=32",
    "data.eval_sequences=2",
    f"train.max_steps={NUM_STEPS}",
    "train.micro_batch_size=2",
    "checkpoint.every=1",
    f"checkpoint.keep={NUM_STEPS}",
    "adapter.merge=false",
    "optimizer.eps=1e-4",  # Adam makes whole steps of gradients that are zero but for rounding
    # So that runs of fewer steps are the beginning of longer ones.
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
)
LORA = ("adapter=lora", "adapter.rank=4", "adapter.alpha=8")
DORA = (*LORA, "adapter.dora=true")
LOKR = ("adapter.type=lokr", "adapter.rank=4")
QLORA = ("adapter=qlora", "adapter.rank=4", "adapter.alpha=8")
"""PEFT puts it beside stacks of experts, too."""
EXPERTS = (
    "model.type=qwen3_moe",
    "+model.config.num_experts=4",
    "+model.config.num_experts_per_tok=2",
    "+model.config.moe_intermediate_size=32",
    "+model.config.head_dim=16",
)
HEAD = (*LORA, "adapter.modules_to_save=[lm_head]")
"""Under ZeRO-3 its loss is not computed in chunks."""
ANY_LOSS = "model.loss=auto"
LAYOUTS = {
    "zbv": ("strategy=pipeline", "strategy.schedule=zbv"),
    "pipeline_fsdp2": ("strategy=fsdp2", "strategy.pipeline=2", "strategy.schedule=zbv"),
    "expert": ("strategy=ddp", "strategy.expert=2"),
    "fsdp2_tensor": ("strategy=fsdp2", "strategy.tensor=2"),
}
FOUR_STAGES = {"zbv", "pipeline_fsdp2"}


@pytest.fixture(scope="module")
def bases(request, tmp_path_factory, cache_dir):
    """Models that runs have left, made once: for QLoRA one with experts, which are packed as its matrices are."""
    made = {}
    has_four_stages = not FOUR_STAGES.isdisjoint(chosen(request, "strategy"))

    def get(choice):
        kind = EXPERTS if "adapter=qlora" in choice else ()
        if kind not in made:
            sizes = ("train.max_steps=3", f"model.config.num_hidden_layers={4 if has_four_stages else 2}")
            made[kind] = pretrain(tmp_path_factory.mktemp("base"), 1, *sizes, *kind)
        return made[kind]

    return get


@pytest.fixture(scope="module")
def base(bases):
    """One without experts."""
    return bases(())


@pytest.fixture(scope="module")
def run(bases):
    """Fine-tune one."""

    def start(folder, num_processes, *overrides):
        fixed = ("model=hub", f"model.name={bases(overrides) / 'model'}", *SHORT)
        return pretrain(folder, num_processes, *fixed, *overrides)

    return start


@pytest.fixture(scope="module")
def single(run, tmp_path_factory):
    """The reference for each choice of what is trained, made once."""
    made = {}

    def get(choice):
        if choice not in made:
            made[choice] = run(tmp_path_factory.mktemp("single"), 1, "strategy=single", *choice)
        return made[choice]

    return get


@pytest.mark.parametrize(
    ("strategy", "num_processes", "choice"),
    [
        # What goes on in any other layout, or opens in PEFT, below, is trained in those as well.
        many("zero3", 2, LORA),
        many("pipeline", 2, (*LORA, "train.gradient_checkpointing=true")),
        many("fsdp2", 2, HEAD),
        many("pipeline_fsdp2", 4, LORA),
        many("pipeline", 2, DORA),
        many("pipeline_fsdp2", 4, (*QLORA, "train.gradient_checkpointing=true")),
        many("ddp", 2, QLORA),
        many("zero2", 2, QLORA),
        many("zero3", 2, QLORA),
        # LoRA of the experts goes to the ranks that have them.
        many("moe", 4, (*QLORA, "train.gradient_checkpointing=true")),
        many("zero3", 2, LOKR),
        many("zbv", 2, HEAD),
        many("tensor", 2, HEAD),
        ("tensor", 2, (*DORA, "adapter.targets=[q_proj]")),
        many("fsdp2_tensor", 4, LORA),
    ],
)
def test_trains_as_one_process_does(run, single, tmp_path, strategy, num_processes, choice):
    reference = single(choice)
    ours = run(tmp_path, num_processes, *LAYOUTS.get(strategy, (f"strategy={strategy}",)), *choice)
    rows = compare_runs(ours, reference, BOUNDS[Precision.fp32])
    assert all(row.passed for row in rows), rows
    assert losses(reference)[-1] != losses(reference)[0]


@pytest.mark.parametrize(
    ("layouts", "choice"), [(("zero3", "pipeline"), (*HEAD, ANY_LOSS)), many(("fsdp2", "expert"), QLORA)]
)
def test_goes_on_in_any_other_layout(run, single, tmp_path, layouts, choice):
    """Three lives, each in another layout, make the steps of one.

    Frozen weights without adapters pass through the same layouts in test_layout_changes.py."""
    reference = single(choice)
    for steps, strategy in enumerate([*layouts, "single"], start=1):
        num_processes = 1 if strategy == "single" else 2
        layout = LAYOUTS.get(strategy, (f"strategy={strategy}",))
        run(tmp_path, num_processes, *layout, *choice, f"train.max_steps={steps}")
    rows = compare_runs(tmp_path, reference, BOUNDS[Precision.fp32])
    assert all(row.passed for row in rows), rows


def test_noise_on_the_embedding_is_added_in_training_alone(run, single, tmp_path):
    """NEFTune is the Trainer's own: here it must reach the stages of a pipeline, and end with the training."""
    still = ("optimizer.lr=1e-30", "train.max_steps=1", "checkpoint.every=null", *LORA)
    noisy = run(tmp_path, 2, "strategy=pipeline", *still, "+train.arguments.neftune_noise_alpha=50")
    quiet = single(still)
    assert all(abs(a - b) > 1e-2 for a, b in zip(losses(noisy), losses(quiet), strict=True))
    assert eval_losses(noisy) == pytest.approx(eval_losses(quiet), rel=1e-6)


@pytest.mark.parametrize(
    ("strategy", "choice"),
    [many("zero3", (*HEAD, ANY_LOSS)), ("fsdp2", (*QLORA, "train.gradient_checkpointing=true")), many("expert", QLORA)],
)
def test_it_trains_as_one_process_does_and_the_adapter_opens_in_peft_and_merges(
    run, single, bases, tmp_path, strategy, choice
):
    base = bases(choice)
    layout = LAYOUTS.get(strategy, (f"strategy={strategy}",))
    ours = run(tmp_path, 2, *layout, *choice, "adapter.merge=true", "report.sample_prompt=def")
    rows = compare_runs(ours, single(choice), BOUNDS[Precision.fp32])
    assert all(row.passed for row in rows), rows
    checkpoint = ours / "checkpoints" / f"step-{NUM_STEPS:08d}"
    model = AutoModelForCausalLM.from_pretrained
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        by_peft = PeftModel.from_pretrained(model(base / "model"), ours / "adapter")(tokens).logits
        by_checkpoint = PeftModel.from_pretrained(model(base / "model"), checkpoint)(tokens).logits
        merged_model = model(ours / "model", dtype="auto")
        merged = merged_model(tokens).logits
        before = model(base / "model")(tokens).logits
    assert merged_model.dtype == model(base / "model", dtype="auto").dtype
    assert torch.equal(by_peft, by_checkpoint)
    assert torch.allclose(by_peft, merged, atol=1e-5)
    assert not torch.allclose(before, merged, atol=1e-3)
    # Nothing of the base is in a checkpoint but its name.
    saved = load_file(checkpoint / "adapter_model.safetensors")
    assert not any(name.endswith(("base_layer.weight", "_proj")) for name in saved)
    assert PeftConfig.from_pretrained(checkpoint).base_model_name_or_path == str(base / "model")


def _compose(folder, *overrides):
    config = compose_config(["model=hub", f"model.name={folder}", *SHORT, *QLORA, *overrides])
    return config, find_architecture(config.model, sequence_length=32)


def _held(folder):
    """Packed bytes, those of all weights, numbers of parameters, and logits: whole, and once FSDP2 has sharded them."""
    config, architecture = _compose(folder)
    model = build_model(config.model, architecture, seed=0, trained=TrainableParameters.of(config))
    packed_names = {name for name, parameter in model.named_parameters() if parameter in packed_shapes(model)}

    def held(engine):
        parameters = dict(engine.model.named_parameters())
        num_bytes = [local_tensor(parameters[name]).untyped_storage().nbytes() for name in packed_names]
        all_bytes = engine.held_bytes(torch.device("cpu"))["weights"]
        with torch.no_grad():
            return sum(num_bytes), all_bytes, engine.size, engine.model(torch.arange(32)[None]).logits.tolist()

    return held(Engine(model)), held(make_strategy(sharding="fsdp2", global_batch_size=2).build(model))


def test_fsdp_ranks_share_the_packed_weights_as_planned(bases):
    base = bases(QLORA)
    for whole, sharded in run_ranks(_held, 2, base / "model"):
        assert 2 * sharded[0] == whole[0] > 0
        assert sharded[2:] == whole[2:]
    planned = trace_rank(*_compose(base / "model", "strategy=fsdp2"), world_size=2, rank=0).state.weights
    assert planned == sharded[1]


def _train_resized(folder, base, layout):
    """LoRA beside embeddings of another size than the base's; gives the logits of what PEFT opens, and the trained."""
    strategy = hfdist.make_strategy(global_batch_size=4, micro_batch_size=2, **layout)
    arguments = TrainingArguments(
        str(folder), max_steps=2, learning_rate=1e-2, report_to="none", use_cpu=True, save_strategy="no", seed=0,
        disable_tqdm=True, **strategy.training_arguments(),
    )  # fmt: skip

    def opened():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        size = model.get_input_embeddings().num_embeddings
        model.resize_token_embeddings(size + 8, mean_resizing=False)
        return model, torch.arange(size - 8, size + 8)[None]

    with strategy.without_partitioning(arguments):
        model, ids = opened()
    rows = [{"input_ids": ids[0], "labels": ids[0]}] * 8
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = hfdist.Trainer(get_peft_model(model, adapter), arguments, strategy=strategy, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(folder / "final"))
    if not trainer.is_world_process_zero():
        return None
    with strategy.without_partitioning(arguments), torch.no_grad():
        logits = PeftModel.from_pretrained(opened()[0], folder / "final").eval()(ids).logits
    return logits.tolist(), len(load_file(folder / "final" / "adapter_model.safetensors"))


def _train_all_resized(folder, base, layouts):
    found = []
    for number, layout in enumerate(layouts):
        forget_parent()
        found.append(_train_resized(folder / str(number), base, layout))
    return found


def test_embeddings_of_another_size_are_saved_in_each_layout(base, tmp_path):
    layouts = {"sharding": "fsdp2"}, {"pipeline": 2}
    [expected] = run_ranks(_train_resized, 1, tmp_path / "single", base / "model", {})
    of_layouts = run_ranks(_train_all_resized, 2, tmp_path, base / "model", layouts)[0]
    for layout, ours in zip(layouts, of_layouts, strict=True):
        assert ours[1] == expected[1], layout
        torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(expected[0]), rtol=1e-4, atol=1e-5)
