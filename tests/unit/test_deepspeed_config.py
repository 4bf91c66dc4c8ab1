"""The generated DeepSpeed config, and mistakes in the further keys."""

import json

import pytest

from hfdist.config.batch import plan_batch
from hfdist.config.composition.compose import compose_config
from hfdist.config.strategy import Offload, Sharding, StrategyConfig
from hfdist.config.train import Precision, TrainConfig
from hfdist.errors import ConfigError
from hfdist.strategies.deepspeed.deepspeed_config import generate
from hfdist.strategies.from_python import make_strategy
from hfdist.strategies.pipelines import zero as pipelines_zero
from hfdist.strategies.select import select_strategy
from hfdist.topology import Topology


def config(strategy: StrategyConfig, train: TrainConfig | None = None, device_type: str = "cpu"):
    batch = plan_batch(global_batch_size=32, micro_batch_size=4, data_size=2, sequence_length=16, lanes=48)
    return generate(strategy, train or TrainConfig(), batch, device_type)


def leaves(value):
    if isinstance(value, dict):
        for inner in value.values():
            yield from leaves(inner)
    else:
        yield value


@pytest.mark.parametrize("sharding", [Sharding.zero1, Sharding.zero2, Sharding.zero3])
def test_every_number_is_written_out_and_deepspeed_accepts_them(sharding):
    from deepspeed.runtime.config import DeepSpeedConfig

    generated = config(StrategyConfig(sharding=sharding, offload=Offload.cpu))
    assert "auto" not in list(leaves(generated))
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [generated[size] for size in sizes] == [32, 4, 4]
    parsed = DeepSpeedConfig({**generated, "train_batch_size": 16})  # of one process
    assert parsed.zero_config.stage == {"zero1": 1, "zero2": 2, "zero3": 3}[sharding.value]
    assert parsed.zero_config.offload_optimizer.device == "cpu"
    assert parsed.gradient_clipping == 1.0


@pytest.mark.parametrize("precision", list(Precision))
def test_precision_switches_one_section_on(precision):
    generated = config(StrategyConfig(sharding=Sharding.zero2), TrainConfig(precision=precision))
    assert generated["bf16"]["enabled"] is (precision is Precision.bf16)
    assert generated["fp16"]["enabled"] is (precision is Precision.fp16)


def test_further_keys_are_merged_over_the_generated_ones():
    extra = {"zero_optimization": {"reduce_bucket_size": 1000, "round_robin_gradients": True}}
    section = config(StrategyConfig(sharding=Sharding.zero2, deepspeed=extra))["zero_optimization"]
    assert (section["reduce_bucket_size"], section["round_robin_gradients"], section["stage"]) == (1000, True, 2)


def test_deepspeed_takes_a_field_by_either_of_its_names():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    extra = {"zero_optimization": {"prefetch_bucket_size": 1000, "stage3_max_live_parameters": 2000}}
    section = config(StrategyConfig(sharding=Sharding.zero3, deepspeed=extra))["zero_optimization"]
    read = DeepSpeedZeroConfig(**section)
    assert (read.prefetch_bucket_size, read.max_live_parameters) == (1000, 2000)


@pytest.mark.parametrize(
    ("extra", "where", "hint"),
    [
        ({"zero_optimzation": {}}, "strategy.deepspeed.zero_optimzation", "strategy.deepspeed.zero_optimization"),
        (
            {"zero_optimization": {"reduce_bucket": 1}},
            "strategy.deepspeed.zero_optimization.reduce_bucket",
            "strategy.deepspeed.zero_optimization.reduce_bucket_size",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"pin_memry": True}}},
            "strategy.deepspeed.zero_optimization.offload_optimizer.pin_memry",
            "strategy.deepspeed.zero_optimization.offload_optimizer.pin_memory",
        ),
        ({"zero_optimization": {"stage": 3}}, "strategy.deepspeed.zero_optimization.stage", "strategy.sharding"),
        ({"train_batch_size": 3}, "strategy.deepspeed.train_batch_size", "train.global_batch_size"),
        ({"gradient_accumulation_steps": 3}, "strategy.deepspeed.gradient_accumulation_steps", "micro_batch_size"),
        ({"gradient_clipping": 3.0}, "strategy.deepspeed.gradient_clipping", "train.max_grad_norm"),
        ({"bf16": {"enabled": True}}, "strategy.deepspeed.bf16.enabled", "train.precision"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "strategy.deepspeed.zero_optimization.offload_optimizer.device",
            "strategy.offload",
        ),
        (
            {"zero_optimization": {"offload_optimizer": None}, "zero_optimisation": "auto"},
            "strategy.deepspeed.zero_optimisation",
            "strategy.deepspeed.zero_optimization",
        ),
        (
            {"zero_optimization": {"reduce_buket_size": "auto"}},
            "strategy.deepspeed.zero_optimization.reduce_buket_size",
            "strategy.deepspeed.zero_optimization.reduce_bucket_size",
        ),
        (
            {"zero_optimization": {"cpu_offload": True}},
            "strategy.deepspeed.zero_optimization.cpu_offload",
            "strategy.offload",
        ),
        ({"aio": {"block_size": 1}}, "strategy.deepspeed.aio", "does not go to DeepSpeed"),
        (
            {"zero_optimization": {"reduce_bucket_size": "big"}},
            "strategy.deepspeed.zero_optimization.reduce_bucket_size",
            "valid integer",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": -1}},
            "strategy.deepspeed.zero_optimization.reduce_bucket_size",
            "greater than 0",
        ),
        ({"prescale_gradients": 3}, "strategy.deepspeed.prescale_gradients", "bool"),
        ({"fp16": True}, "strategy.deepspeed.fp16", "train.precision"),
        (
            {"data_types": {"grad_accum_dtype": "bf16"}},
            "strategy.deepspeed.data_types.grad_accum_dtype",
            "train.precision",
        ),
        (
            {"data_types": {"grad_acum_dtype": "fp32"}},
            "strategy.deepspeed.data_types.grad_acum_dtype",
            "strategy.deepspeed.data_types.grad_accum_dtype",
        ),
        ({"train_batch_size": {}}, "strategy.deepspeed.train_batch_size", "int"),
        ({7: 1}, "strategy.deepspeed.7", "does not go to DeepSpeed"),
        ({"zero_optimization": {7: 1}}, "strategy.deepspeed.zero_optimization.7", "no such key"),
        ({"data_types": {7: 1}}, "strategy.deepspeed.data_types.7", "no such key"),
    ],
)
def test_mistakes_name_the_full_key_and_the_way_out(extra, where, hint):
    with pytest.raises(ConfigError) as caught:
        config(StrategyConfig(sharding=Sharding.zero2, deepspeed=extra))
    assert caught.value.where == where
    assert hint in str(caught.value)


AS_OTHERS_WRITE_IT = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": False},
    "data_types": {"grad_accum_dtype": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto", "total_num_steps": 100}},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "none"},
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": "auto",
        "round_robin_gradients": True,
    },
}


def test_a_file_is_taken_as_it_is(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(AS_OTHERS_WRITE_IT))
    composed = compose_config(["model=tiny", "strategy=zero2", f"strategy.deepspeed={file}", "train.max_steps=100"])
    assert composed.strategy.deepspeed == AS_OTHERS_WRITE_IT
    made = config(composed.strategy)
    section = made["zero_optimization"]
    assert (section["reduce_bucket_size"], section["round_robin_gradients"], section["stage"]) == (5e8, True, 2)
    assert "auto" not in list(leaves(made))
    assert made["fp16"] == {"enabled": False, "loss_scale": 0, "initial_scale_power": 16}
    assert (made["train_batch_size"], "optimizer" in made, "scheduler" in made) == (32, False, False)


@pytest.mark.parametrize(
    ("section", "where", "key"),
    [
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type", "optimizer.name"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1}}}, "optimizer.params.lr", "optimizer.lr"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler.type", "optimizer.schedule"),
        (
            {"scheduler": {"params": {"warmup_num_steps": 7}}},
            "scheduler.params.warmup_num_steps",
            "optimizer.warmup_steps",
        ),
    ],
)
def test_a_file_says_no_other_optimizer(tmp_path, section, where, key):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(section))
    with pytest.raises(ConfigError) as caught:
        compose_config(["model=tiny", "strategy=zero1", f"strategy.deepspeed={file}"])
    assert caught.value.where == f"strategy.deepspeed.{where}"
    assert key in caught.value.hint


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "[" * 2000, '{"a": ' * 100 + "1" + "}" * 100, " " * (1 << 21), '{"a b": 1}', '{"a": "${b}"}'],
)
def test_a_file_that_is_no_config_is_refused(tmp_path, text):
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose_config(["model=tiny", "strategy=zero1", f"strategy.deepspeed={file}"])
    assert caught.value.where.startswith("strategy.deepspeed (command line)")
    with pytest.raises(ConfigError) as caught:
        make_strategy(global_batch_size=8, sharding="zero2", deepspeed=str(file))
    assert caught.value.where.startswith("make_strategy(deepspeed)")


def test_python_takes_a_file_too(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": AS_OTHERS_WRITE_IT["zero_optimization"]}))
    made = make_strategy(global_batch_size=8, sharding="zero2", data=1, min_data=1, deepspeed=file)
    assert made.training_arguments()["deepspeed"]["zero_optimization"]["reduce_bucket_size"] == 5e8
    file.write_text(json.dumps(AS_OTHERS_WRITE_IT))
    with pytest.raises(ConfigError) as caught:
        make_strategy(global_batch_size=8, sharding="zero2", deepspeed=str(file))
    assert caught.value.where == "make_strategy(deepspeed.optimizer.type)"
    assert "args.optim" in caught.value.hint


@pytest.mark.parametrize(
    ("precision", "left_out"),
    [
        (Precision.fp16, "zero_optimization.overlap_comm, strategy.deepspeed.fp16.initial_scale_power"),
        (Precision.bf16, "zero_optimization.overlap_comm"),
    ],
)
def test_a_pipeline_names_the_keys_that_it_leaves_out(monkeypatch, caplog, precision, left_out):
    monkeypatch.setattr(pipelines_zero, "start_deepspeed", lambda: None)
    section = {"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 1000}}
    for given in ({}, section | {"fp16": {"enabled": "auto", "initial_scale_power": 8, "loss_scale": "auto"}}):
        strategy = StrategyConfig(pipeline=2, sharding=Sharding.zero1, deepspeed=given)
        batch = plan_batch(global_batch_size=32, micro_batch_size=4, data_size=1, sequence_length=16, lanes=48)
        train = TrainConfig(precision=precision)
        topology = Topology(pipeline=2)
        selected = select_strategy(strategy, train, topology=topology, batch=batch, device_type="cpu")
        # A recipe starts it, and then its Trainer.
        selected.start()
        selected.start()
    [told] = [record.message for record in caplog.records if "left out" in record.message]
    assert told.startswith(f"strategy.deepspeed.{left_out}: left out.")


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_on_a_cpu_gradients_are_reduced_to_the_rank_that_steps_them(device_type):
    section = config(StrategyConfig(sharding=Sharding.zero2), device_type=device_type)["zero_optimization"]
    assert section["use_multi_rank_bucket_allreduce"] is (device_type == "cuda")


def test_zero_plus_plus_needs_a_gpu():
    strategy = StrategyConfig(
        sharding=Sharding.zero3, deepspeed={"zero_optimization": {"zero_quantized_gradients": True}}
    )
    section = config(strategy, device_type="cuda")["zero_optimization"]
    assert section["zero_quantized_gradients"] is True
    with pytest.raises(ConfigError, match="on GPUs only") as caught:
        config(strategy)
    assert caught.value.where == "strategy.deepspeed.zero_optimization.zero_quantized_gradients"
