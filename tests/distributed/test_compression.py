"""Compressed gradients: the bytes that travel, what the ranks make of them, and what is left for a later step."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.mesh.theory import Model
from benchmarks.small_llama import make_trainer
from hfdist.collectives import gather_json
from hfdist.config.strategy import Compression, StrategyConfig
from hfdist.config.train import TrainConfig
from hfdist.planning.timing.traffic import step_sizes
from hfdist.records import RunRecorder, read_run
from hfdist.run.callbacks.traffic import Traffic
from hfdist.strategies.gradients.compression import GradientCompressor
from hfdist.testing import forget_parent, run_ranks
from tests.distributed.runs import losses, pretrain, weights
from tests.distributed.test_resume import SAVING, stopped
from tests.marks import chosen, many

pytestmark = pytest.mark.distributed

# More than the first bucket's megabyte: two buckets.
SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}  # fmt: skip
WEIGHT_BYTES = 4 * Model.of(SIZES).parameters
NUM_RANKS, NUM_STEPS, SHARE, RANK = 3, 4, 0.01, 2
EARLY = {"compression_warmup_steps": 2}
KEYS = {
    "none": {},
    "fp16": {"compression": "fp16"},
    "bf16": {"compression": "bf16"},
    "powersgd": {"compression": "powersgd", "compression_rank": RANK} | EARLY,
    "topk": {"compression": "topk", "compression_share": SHARE} | EARLY,
    "all of topk": {"compression": "topk", "compression_share": 1.0} | EARLY,
}
EACH = [many(name) if name == "fp16" else name for name in KEYS]
RING = 2 * (NUM_RANKS - 1) / NUM_RANKS


def train(names):
    """By name: losses, bytes of a step, whether all ranks have the same weights, and bytes as a plan has them."""
    found = {}
    for name in names:
        keys = KEYS[name]
        forget_parent()
        folder = Path(gather_json(tempfile.mkdtemp())[0])
        trainer = make_trainer(
            str(folder), keys, SIZES, batch=(NUM_RANKS, 1), sequence_tokens=32, max_steps=NUM_STEPS, callbacks=[]
        )
        trainer.args.logging_steps, trainer.state.logging_steps = 1, 1
        recorder = RunRecorder(folder, {}, NUM_RANKS) if dist.get_rank() == 0 else None
        warm_up_steps = trainer.strategy.config.num_uncompressed_steps
        wait = trainer.checkpointer.wait
        trainer.add_callback(Traffic(trainer.strategy.topology, recorder, wait=wait, warm_up_steps=warm_up_steps))
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        sums = gather_json([float(p.detach().double().sum()) for p in trainer.model.parameters()])
        sizes = step_sizes(trainer.model, TrainConfig(), is_gpu=False)
        planned = sum(one.num_bytes for one in trainer.strategy.traffic(sizes))
        sent = read_run(folder).sent_bytes()["data"] if recorder is not None else 0
        found[name] = losses, sent, all(own == sums[0] for own in sums), planned
    return found


@pytest.fixture(scope="module")
def trained(request):
    names = [name for name in KEYS if name in chosen(request, "name") | {"none"}]
    return run_ranks(train, NUM_RANKS, names, timeout_seconds=280)[0]


def powersgd_bytes():
    """Of each matrix two factors, of what is no matrix all."""
    whole = 0
    width = {"q": (128, 128), "gate": (352, 128), "down": (128, 352), "embedding": (512, 128)}
    for name, count in (("q", 4 * 2), ("gate", 2 * 2), ("down", 2), ("embedding", 2)):
        whole += count * RANK * sum(width[name])
    norms = (2 * 2 + 1) * 128
    return 4 * RING * (whole + norms)


EXPECTED_BYTES = {
    "none": RING * WEIGHT_BYTES,
    "fp16": RING * WEIGHT_BYTES / 2,
    "bf16": RING * WEIGHT_BYTES / 2,
    "powersgd": powersgd_bytes(),
    # A number and its place, to each other rank.
    "topk": (NUM_RANKS - 1) * SHARE * WEIGHT_BYTES * 2,
    "all of topk": (NUM_RANKS - 1) * WEIGHT_BYTES * 2,
}


@pytest.mark.parametrize("name", EACH)
def test_a_step_sends_what_the_kind_promises(trained, name):
    assert trained[name][1] == pytest.approx(EXPECTED_BYTES[name], rel=0.05)


@pytest.mark.parametrize("name", EACH)
def test_a_plan_knows_what_is_sent(trained, name):
    # The norms are no matrices, and these matrices are wider than the hidden states.
    bound = 0.5 if name == "powersgd" else 0.05
    assert trained[name][3] == pytest.approx(trained[name][1], rel=bound)


@pytest.mark.parametrize("name", EACH)
def test_all_ranks_have_the_same_weights(trained, name):
    assert trained[name][2]


@pytest.mark.parametrize(("name", "bound"), [("all of topk", 1e-5), many("fp16", 1e-3), ("bf16", 1e-2)])
def test_what_leaves_nothing_out_trains_as_without(trained, name, bound):
    assert trained[name][0] == pytest.approx(trained["none"][0], rel=bound)


class Given(nn.Module):
    """Its gradients are what it was called with."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 96))

    def forward(self, gradient):
        return (self.weight * gradient).sum()


def exchange(kind, is_bad_at, scales=(1.0,) * 40):
    """Each rank's gradients, and what it got for them, by step, each with its loss scale."""
    model = DistributedDataParallel(Given())
    config = StrategyConfig(compression=Compression[kind], compression_warmup_steps=2, compression_share=0.1)
    topology = config.topology(2, rank=dist.get_rank())
    compressor = GradientCompressor(model.module, topology, config)
    compressor.register(model)
    random = torch.Generator().manual_seed(dist.get_rank())
    given, got = [], []
    for number, scale in enumerate(scales):
        gradient = torch.randn(64, 96, generator=random)
        if number == is_bad_at and dist.get_rank() == 1:
            gradient[3, 5] = float("nan")
        model.zero_grad()
        compressor.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        compressor.scaler.scale(model(gradient)).backward()
        given.append(gradient.numpy())
        got.append(model.module.weight.grad.div(scale).numpy())
    return given, got


@pytest.mark.parametrize("kind", ["topk", "powersgd"])
def test_what_is_left_out_comes_later(kind):
    ranks = run_ranks(exchange, 2, kind, None)
    mean = [(a + b) / 2 for a, b in zip(ranks[0][0], ranks[1][0], strict=True)]
    got = ranks[0][1]
    assert all((a == b).all() for a, b in zip(got, ranks[1][1], strict=True))
    late, sent = sum(mean[2:]), sum(got[2:])
    # One step lacks most; all of them together no more than what is left of the last few.
    assert abs(got[-1] - mean[-1]).max() > 0.5 * abs(mean[-1]).max()
    correlation = (late * sent).sum() / ((late**2).sum() * (sent**2).sum()) ** 0.5
    of_one = (mean[2] * got[2]).sum() / ((mean[2] ** 2).sum() * (got[2] ** 2).sum()) ** 0.5
    assert correlation > of_one


@pytest.mark.parametrize("kind", ["topk", "powersgd"])
def test_a_loss_scale_that_changes_changes_nothing(kind):
    plain, scaled = (run_ranks(exchange, 2, kind, None, scales) for scales in ([1.0] * 8, [1.0, 8.0, 8.0, 2.0] * 2))
    for (_, got), (_, of_scaled) in zip(plain, scaled, strict=True):
        assert all(abs(a - b).max() < 1e-5 for a, b in zip(got, of_scaled, strict=True))


@pytest.mark.parametrize("kind", ["topk", many("powersgd"), "fp16"])
def test_a_number_that_is_not_finite_spoils_one_step_on_all_ranks(kind):
    ranks = run_ranks(exchange, 2, kind, 10)
    for _, got in ranks:
        finite = [bool((abs(step) < 1e6).all()) for step in got]
        assert [number for number, is_finite in enumerate(finite) if not is_finite] == [10]
    assert all((a == b).all() for a, b in zip(ranks[0][1][11:], ranks[1][1][11:], strict=True))


def test_of_a_bucket_without_a_matrix_nothing_empty_is_sent(monkeypatch):
    model, sent = nn.Linear(3, 1), []
    config = StrategyConfig(compression=Compression.powersgd, compression_rank=1)
    compressor = GradientCompressor(model, config.topology(1, rank=0), config)
    monkeypatch.setattr(compressor, "mean", lambda tensor: sent.append(tensor.numel()) or tensor)
    gradients = [torch.ones(1, 3), torch.ones(1)]
    bucket = SimpleNamespace(parameters=lambda: list(model.parameters()), gradients=lambda: gradients)
    compressor.send_factors(bucket)
    assert sent == [4]


def test_layouts_without_ddp_refuse_it():
    import hfdist
    from hfdist.errors import ConfigError

    for keys in ({"sharding": "fsdp2"}, {"pipeline": 2}, {"tensor": 2}, {}):
        with pytest.raises(ConfigError, match=r"compress|one process"):
            hfdist.make_strategy(
                global_batch_size=4, micro_batch_size=1, sequence_length=32, compression="fp16", **keys
            )


DEFERRED = ("strategy=ddp", "strategy.compression_warmup_steps=3", "strategy.compression_share=0.05", *SAVING)


@pytest.fixture(scope="module", params=["powersgd", many("topk")])
def whole(request, tmp_path_factory, cache_dir):
    kind = f"strategy.compression={request.param}"
    return pretrain(tmp_path_factory.mktemp(request.param), 2, *DEFERRED, kind), kind


def test_a_resume_has_what_was_left_out(whole, tmp_path):
    run, kind = whole
    stopped(run, tmp_path, 10)
    pretrain(tmp_path, 2, *DEFERRED, kind)
    assert losses(tmp_path) == losses(run)
    for name, reference in weights(run).items():
        assert torch.equal(weights(tmp_path)[name], reference), name


@pytest.mark.parametrize("layout", ["zero1", many("ddp")])
def test_other_layouts_go_on_without_it(whole, tmp_path, layout):
    run, kind = whole
    stopped(run, tmp_path, 10)
    if layout == "ddp":
        pretrain(tmp_path, 4, *DEFERRED, kind, "train.micro_batch_size=1")
    else:
        pretrain(tmp_path, 2, *SAVING, f"strategy={layout}")
    assert losses(tmp_path) == pytest.approx(losses(run), rel=0.02)
