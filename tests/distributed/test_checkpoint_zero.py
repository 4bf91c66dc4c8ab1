"""Where DeepSpeed keeps its state: every setting that moves it, saved in one and loaded into a single process.

Tiny models are stepped by hand. Other layouts, and changes between all of them, are in test_layout_changes.py.
"""

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.ops import __compatible_ops__
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

from hfdist.checkpoint import read_checkpoint
from hfdist.errors import CheckpointError
from hfdist.strategies import pieces
from hfdist.strategies.deepspeed import pieces_zero
from hfdist.testing import run_ranks
from tests.marks import chosen, many
from tests.unit.checkpoint.pieces import write_checkpoint
from tests.unit.tiny import llama

pytestmark = pytest.mark.distributed

HALF, END = 3, 6
SEQUENCES, TOKENS, VOCABULARY = 12, 9, 61
OTHER_SEED = 1
"""Of the model that is loaded into: nothing may be right by chance, frozen weights least of all."""
FROZEN = {"model.layers.0.input_layernorm.weight", "model.layers.1.mlp.up_proj.weight"}

# The tiny model's parameters are below every threshold: without persistence all of them are really cut.
SETTINGS = {
    "zero1_round_robin": (1, {"round_robin_gradients": True}),
    "zero2_round_robin": (2, {"round_robin_gradients": True}),
    "zero2_offload": (2, {"offload_optimizer": {"device": "cpu"}}),
    "zero3_not_persistent": (3, {"stage3_param_persistence_threshold": 0}),
    "zero3_sub_groups": (3, {"sub_group_size": 500, "stage3_param_persistence_threshold": 100}),
    "zero3_offload": (3, {"offload_optimizer": {"device": "cpu"}}),
    "zero3_offload_weights": (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
}
ALWAYS = ("zero2_round_robin", "zero3_sub_groups", "zero3_offload_weights")
HALF_PRECISION = {"zero1": 1, "zero2": 2, "zero3": 3}
READ_BY_BFLOAT16, READ_BY_FLOAT32 = "zero3_sub_groups", "zero3"


class Replicated:
    """The model whole: single, or DDP where there is a group."""

    list_pieces = staticmethod(pieces.list_pieces)

    def __init__(self, *, seed=0, **options):
        self.model = make_model(seed)
        self.engine = DistributedDataParallel(self.model) if dist.is_initialized() else self.model
        self.optimizer = self.holder = make_optimizer(self.model, **options)

    def step(self, step):
        loss = mean_loss(self.engine, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return global_mean(loss)

    def save(self, folder, step=HALF):
        write_config = self.model.config.save_pretrained
        every = self.list_pieces(self.model, self.holder)
        return write_checkpoint(folder, step=step, pieces=every, state={}, write_model_files=write_config)

    def load(self, path):
        read_checkpoint(path, self.list_pieces(self.model, self.holder))
        return self

    def close(self):
        pass


class Zero(Replicated):
    """DeepSpeed ZeRO."""

    list_pieces = staticmethod(pieces_zero.list_pieces)

    def __init__(self, stage, *, seed=0, precision="fp32", section=None, **options):
        # As in ZeroStrategy.start: no compiling, nothing left in /dev/shm.
        __compatible_ops__["deepspeed_shm_comm"] = False
        self.model = make_model(seed)
        config = {
            "train_micro_batch_size_per_gpu": SEQUENCES // dist.get_world_size(),
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage, "overlap_comm": False, **(section or {})},
            "bf16": {"enabled": precision == "bf16"},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = make_optimizer(self.model, **options)
        self.engine, *_ = deepspeed.initialize(
            model=self.model, optimizer=optimizer, config=config, dist_init_required=False
        )
        self.holder = self.engine

    def step(self, step):
        loss = mean_loss(self.engine, step)
        self.engine.backward(loss)
        self.engine.step()
        return global_mean(loss)

    def load(self, path):
        super().load(path)
        pieces_zero.after_load(self.model, self.engine)
        return self

    def close(self):
        self.engine.destroy()


def make_model(seed):
    """A Llama with tied embeddings, sizes that three ranks do not divide, and two frozen parameters."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 20, "intermediate_size": 34}
    model = llama(**sizes, tie_word_embeddings=True, attn_implementation="eager")
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    return model


def make_optimizer(model, **options):
    """AdamW with the Trainer's two groups: matrices decay, vectors do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if len(getattr(p, "ds_shape", p.shape)) >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if len(getattr(p, "ds_shape", p.shape)) < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, **options)


def mean_loss(model, step):
    """Of this rank's share of the global batch of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    batch = torch.randint(0, VOCABULARY, (SEQUENCES, TOKENS), generator=generator)
    if dist.is_initialized():
        batch = batch.chunk(dist.get_world_size())[dist.get_rank()]
    logits = model(input_ids=batch).logits.float()
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))


def global_mean(loss):
    """Mean over the ranks' equal shares, in float64."""
    total = loss.detach().double()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


def run(engine, first=0, last=END):
    return [engine.step(step) for step in range(first, last)]


@pytest.fixture(scope="module")
def reference():
    return run_ranks(lambda: run(Replicated()), 1, group=False)[0]


@pytest.fixture(scope="module")
def settings(request, tmp_path_factory):
    """By setting: the checkpoint after `HALF` steps, and the losses after it in another engine of the setting."""
    names = [name for name in SETTINGS if name in chosen(request, "setting") | {READ_BY_BFLOAT16}]
    return run_ranks(save_and_continue_all, 2, tmp_path_factory.mktemp("settings"), names)[0]


@pytest.fixture(scope="module")
def continued_alone(settings):
    """By setting: the losses after its checkpoint in a single process."""
    return run_ranks(lambda: {name: continue_alone(path) for name, (path, _) in settings.items()}, 1, group=False)[0]


@pytest.fixture(scope="module")
def half_precision(request, tmp_path_factory):
    """By stage: the checkpoint, and the losses and final weights of the whole run and of the resumed one."""
    names = [name for name in HALF_PRECISION if name in chosen(request, "stage") | {READ_BY_FLOAT32}]
    return run_ranks(resume_bf16_all, 2, tmp_path_factory.mktemp("bf16"), names)[0]


def save_and_continue_all(root, names):
    results = {}
    for name in names:
        stage, section = SETTINGS[name]
        engine = Zero(stage, section=section)
        run(engine, last=HALF)
        path = engine.save(root / name)
        engine.close()
        engine = Zero(stage, section=section, seed=OTHER_SEED)
        # A step before loading: what DeepSpeed derived from the old values must be made anew.
        engine.step(0)
        results[name] = path, run(engine.load(path), HALF)
        engine.close()
    return results


def continue_alone(path):
    return run(Replicated(seed=OTHER_SEED).load(path), HALF)


@pytest.mark.parametrize("setting", [name if name in ALWAYS else many(name) for name in SETTINGS])
def test_a_setting_that_moves_the_state_is_read_and_written_right(reference, settings, continued_alone, setting):
    assert settings[setting][1] == pytest.approx(reference[HALF:], rel=1e-6)
    assert continued_alone[setting] == pytest.approx(reference[HALF:], rel=1e-6)


def resume_fused(folder):
    def build(**options):
        return Zero(2, fused=True, **options) if dist.is_initialized() else Replicated(fused=True, **options)

    engine = build()
    run(engine, last=HALF)
    path = engine.save(folder)
    return run(build(seed=OTHER_SEED).load(path), HALF)


def test_a_fused_optimizer_too(reference, tmp_path):
    for size in (1, 2):
        losses = run_ranks(resume_fused, size, tmp_path / str(size), group=size > 1)[0]
        assert losses == pytest.approx(reference[HALF:], rel=1e-6)


def test_a_checkpoint_of_step_zero_starts_like_a_new_run(reference, tmp_path):
    path = run_ranks(lambda: Zero(2).save(tmp_path, step=0), 2)[0]
    losses = run_ranks(lambda: run(Replicated(seed=OTHER_SEED).load(path)), 1, group=False)[0]
    assert losses == pytest.approx(reference, rel=1e-6)


def resume_bf16_all(root, names):
    results = {}
    for name in names:
        stage = HALF_PRECISION[name]
        whole = Zero(stage, precision="bf16")
        run(whole, last=HALF)
        path = whole.save(root / name)
        losses = run(whole, HALF)
        weights = whole.save(root / f"{name}-whole") / "model.safetensors"
        whole.close()
        resumed = Zero(stage, precision="bf16", seed=OTHER_SEED).load(path)
        again = run(resumed, HALF)
        results[name] = path, (losses, weights), (again, resumed.save(root / f"{name}-resumed") / "model.safetensors")
        resumed.close()
    return results


def load_optimizer(path):
    return load_file(path / "training_state" / "optimizer-00001-of-00001.safetensors")


@pytest.mark.parametrize("stage", [many("zero1"), "zero2", "zero3"])
def test_bfloat16_goes_on_bit_by_bit(half_precision, stage):
    path, (losses, weights), (losses_again, weights_again) = half_precision[stage]
    assert losses_again == losses
    assert weights_again.read_bytes() == weights.read_bytes()
    saved = load_file(path / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    optimizer = load_optimizer(path)
    masters = {key.removesuffix("/master"): value for key, value in optimizer.items() if key.endswith("/master")}
    assert set(saved) - set(masters) == FROZEN, "frozen parameters need no master"
    for tensor, master in masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(master.to(torch.bfloat16), saved[tensor])


def test_float32_layouts_read_the_masters(half_precision, tmp_path):
    """A bfloat16 checkpoint continued in float32 starts from the masters, not from the rounded weights."""
    paths = {name: path for name, (path, *_) in half_precision.items()}

    def save_as_float32():
        return {name: Replicated(seed=OTHER_SEED).load(path).save(tmp_path / name) for name, path in paths.items()}

    for name, again in run_ranks(save_as_float32, 2)[0].items():
        optimizer = load_optimizer(paths[name])
        for tensor, value in load_file(again / "model.safetensors").items():
            assert value.dtype == torch.float32
            assert torch.equal(value, optimizer.get(f"{tensor}/master", value)), (name, tensor)


def test_bfloat16_reads_a_float32_checkpoint(settings, tmp_path):
    """Masters come from the saved float32 weights; the weights are those, rounded."""
    path = settings[READ_BY_BFLOAT16][0]
    written = run_ranks(lambda: Zero(2, precision="bf16", seed=OTHER_SEED).load(path).save(tmp_path), 2)[0]
    optimizer, after = load_optimizer(written), load_file(written / "model.safetensors")
    for tensor, value in load_file(path / "model.safetensors").items():
        assert torch.equal(after[tensor], value.to(torch.bfloat16)), tensor
        assert torch.equal(optimizer.get(f"{tensor}/master", value), value), tensor


def test_weights_that_drifted_from_their_masters_are_not_saved(tmp_path):
    for stage in (2, 3):
        for message in run_ranks(save_drifted, 2, stage, tmp_path):
            assert "drifted apart" in message
    assert not list(tmp_path.iterdir())


def save_drifted(stage, folder):
    engine = Zero(stage, precision="bf16")
    # On rank 1 alone: the other must not wait for it.
    if dist.get_rank() == 1:
        for parameter in engine.model.parameters():
            getattr(parameter, "ds_tensor", parameter).data.add_(1.0)
    with pytest.raises(CheckpointError) as caught:
        engine.save(folder)
    return str(caught.value)
