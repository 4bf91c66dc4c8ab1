"""Islands: launches that train one model together."""

import copy
import os
import signal
import time

import numpy as np
import pytest
import torch

from hfdist.config.composition.compose import compose_config
from hfdist.config.islands import Codec, IslandMethod, IslandsConfig
from hfdist.data import TokenStream
from hfdist.islands import rounds, transport
from hfdist.islands.member import Member
from hfdist.islands.owned_pieces import share_out
from hfdist.islands.transport import Transport
from hfdist.planning.island_traffic import island_traffic
from hfdist.records import RunFolder, read_lines
from hfdist.run.builder import Run
from hfdist.testing import run_ranks
from tests.distributed.island_runs import (
    Island,
    before_steps,
    die_at,
    difference,
    goes_on_as_if_nothing_had_been,
    overrides_of,
    run_islands,
    served,
    shows,
    wait_at,
)
from tests.distributed.runs import SMALL, eval_losses, losses, pretrain, weights
from tests.marks import always, many

pytestmark = pytest.mark.distributed

AVERAGING = ("islands=local_sgd",)
# Adam divides gradients that are all rounding by themselves; with a larger eps less.
PLAIN = ("optimizer.weight_decay=0", "optimizer.eps=1e-5", "optimizer.schedule=constant", "optimizer.warmup_steps=0",
         "train.max_grad_norm=1000", "train.max_steps=7")  # fmt: skip
SHORT = ("train.max_steps=7", "islands.every=3", "data.sequence_length=32", "train.micro_batch_size=2")


@pytest.mark.many  # several islands are those of plain torch, below
def test_one_island_is_the_inner_run(tmp_path):
    (island,) = run_islands(tmp_path, 1, 1, *AVERAGING, *SHORT)
    alone = pretrain(tmp_path / "alone", 1, *SHORT[:1], *SHORT[2:])
    assert losses(island) == pytest.approx(losses(alone), rel=1e-6)
    assert difference(weights(island), weights(alone)) < 1e-6


def train_in_turn(folder, count, keys):
    """One process trains the shares of some islands one after another: by plain torch, without any code of islands.

    Gives the losses of each island, and the last weights.
    """
    config = compose_config([*SMALL, *PLAIN, f"run.dir={folder}"])
    run = Run(config)
    for step in (run.find_model, run.open_data, run.open_folder, run.start_ranks, run.build_model):
        step()
    outer = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    speed = {name: torch.zeros_like(value) for name, value in outer.items()}
    part_of = dict(zip(outer, share_out([value.numel() for value in outer.values()], keys["fragments"]), strict=True))
    models = [copy.deepcopy(run.model).train() for _ in range(count)]
    weights_of = [dict(model.named_parameters()) for model in models]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0)
                  for m in models]  # fmt: skip
    batches = []
    for index in range(count):
        data = run.data.stream
        stream = TokenStream(data.corpus, run.data.tokenizer, config.data, data_rank=index, data_size=count)
        batches.append(iter(stream.loader(batch_size=8)))

    @torch.no_grad()
    def changes(part):
        return {
            name: value - sum(own[name] for own in weights_of) / count
            for name, value in outer.items()
            if part in (None, part_of[name])
        }

    @torch.no_grad()
    def take(found, mix):
        for name, change in found.items():
            speed[name] = keys["outer_momentum"] * speed[name] + change
            outer[name] -= keys["outer_lr"] * (change + keys["outer_momentum"] * speed[name])
            for own in weights_of:
                own[name].copy_(mix * own[name] + (1 - mix) * outer[name])

    found, stride, under_way = [[] for _ in range(count)], keys["every"] // keys["fragments"], {}
    for step in range(1, 8):
        for own, model, optimizer, batch in zip(found, models, optimizers, batches, strict=True):
            loss = model(**next(batch)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            own.append(float(loss))
        if step % stride == 0 and step != 7:
            under_way[min(7, step + keys["overlap"])] = changes(step // stride % keys["fragments"])
        take(under_way.pop(step, {}), keys["mix"])
    take(changes(None), 0.0)
    return found, {name: value.numpy() for name, value in outer.items()}


ALL_AT_ONCE = {"fragments": 1, "overlap": 0, "mix": 0.0, "every": 3}
WAYS = {
    "averaging": ALL_AT_ONCE | {"outer_lr": 1.0, "outer_momentum": 0.0},
    "diloco": ALL_AT_ONCE | {"outer_lr": 0.7, "outer_momentum": 0.9},
    "streaming": {"fragments": 2, "overlap": 1, "mix": 0.5, "every": 4, "outer_lr": 0.7, "outer_momentum": 0.9},
}


@pytest.mark.parametrize("keys", always(["streaming"], WAYS))
def test_islands_are_one_process_that_trains_their_shares_in_turn(tmp_path, keys):
    folders = run_islands(tmp_path, 2, 1, *PLAIN, *(f"islands.{key}={value}" for key, value in keys.items()))
    wanted, outer = run_ranks(train_in_turn, 1, tmp_path / "in_turn", 2, keys, group=False)[0]
    for folder, of_island in zip(folders, wanted, strict=True):
        assert losses(folder) == pytest.approx(of_island, rel=1e-5)
        found = weights(folder)
        assert difference(found, {name: torch.from_numpy(outer[name]) for name in found}) < 1e-5
    assert wanted[0] != wanted[1]


@pytest.mark.many  # the same mean as above, in a simpler case
def test_every_step_with_sgd_is_ddp(tmp_path):
    sgd = ("optimizer.name=sgd", "optimizer.lr=0.1", *PLAIN, "data.packing=concat")
    folders = run_islands(tmp_path, 2, 1, *AVERAGING, *sgd, "train.global_batch_size=4", "islands.every=1")
    ddp = pretrain(tmp_path / "ddp", 2, "strategy=ddp", *sgd)
    assert difference(weights(folders[0]), weights(ddp)) < 1e-6
    mean = [sum(both) / 2 for both in zip(*map(losses, folders), strict=True)]
    assert mean == pytest.approx(losses(ddp), rel=1e-5)


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory, imported, reads_little):
    return run_islands(tmp_path_factory.mktemp("single"), 2, 1, *SHORT)


@pytest.mark.parametrize(
    "layout",
    [
        many(("strategy=ddp",)),
        many(("strategy=zero1",)),
        many(("strategy=zero3",)),
        # Its mean is looked at in test_federated.py and test_parameter_server.py.
        many(("strategy=fsdp2",)),
        many(("strategy=tensor",)),
        ("strategy=pipeline",),
    ],
    ids=lambda layout: layout[0].removeprefix("strategy="),
)
def test_islands_of_any_layout_train_as_those_of_one_process(tmp_path, of_one_rank, layout):
    folders = run_islands(tmp_path, 2, 2, *layout, *SHORT)
    for folder, wanted in zip(folders, of_one_rank, strict=True):
        assert losses(folder) == pytest.approx(losses(wanted), rel=1e-5)
        assert eval_losses(folder) == pytest.approx(eval_losses(wanted), rel=1e-5)
        assert difference(weights(folder), weights(wanted)) < 1e-5
    assert difference(weights(folders[0]), weights(folders[1])) == 0


def sent_bytes(folder):
    return [
        line["islands/sent_bytes"] for line in read_lines(RunFolder(folder).metrics) if "islands/sent_bytes" in line
    ]


def test_what_travels_is_what_theory_says(tmp_path, of_one_rank):
    num_elements = sum(value.numel() for value in weights(of_one_rank[0]).values())
    # Half of the numbers to the other, and the mean of the other half.
    assert sent_bytes(of_one_rank[0]) == [2 * 4 * num_elements / 2] * 3
    folders = run_islands(tmp_path, 2, 1, *SHORT, "islands.codec=int8")
    assert sent_bytes(folders[0]) == pytest.approx([2 * num_elements / 2] * 3, rel=0.02)
    for folder, codec in ((of_one_rank[0], Codec.fp32), (folders[0], Codec.int8)):
        config = IslandsConfig(method=IslandMethod.diloco, count=2, codec=codec)
        assert sent_bytes(folder) == pytest.approx([island_traffic(config, num_elements).sent_bytes] * 3, rel=1e-3)
    assert difference(weights(folders[0]), weights(folders[1])) == 0
    assert eval_losses(folders[0]) == pytest.approx(eval_losses(of_one_rank[0]), rel=0.01)


# ---- checkpoints ----

SAVING = (
    "train.max_steps=9",
    "islands.every=4",
    "checkpoint=default",
    "checkpoint.every=3",
    "checkpoint.background=false",
)


@pytest.mark.parametrize(("num_ranks", "layout"), [(1, "single"), many(2, "ddp")])
def test_a_killed_job_goes_on_as_if_nothing_had_been(tmp_path, num_ranks, layout):
    """The checkpoint of step 6 stands in the middle of a round."""
    goes_on_as_if_nothing_had_been(tmp_path, num_ranks, die_at(8), f"strategy={layout}", *SHORT, *SAVING)


@pytest.mark.many  # they begin at one of an island in test_island_shares.py
def test_islands_begin_at_a_checkpoint_of_an_ordinary_run(tmp_path):
    short = SHORT[2:]
    before = pretrain(tmp_path / "before", 2, "strategy=ddp", *short, *SAVING[2:], "train.max_steps=6")
    start = f"checkpoint.resume={before}/checkpoints/step-00000003"
    allowed = "checkpoint.allow_changes=true"
    folders = run_islands(tmp_path, 2, 1, *short, "islands.every=2", "train.max_steps=6", start, allowed)
    assert difference(weights(folders[0]), weights(folders[1])) == 0
    for folder in folders:
        lines = [line for line in read_lines(RunFolder(folder).metrics) if "loss" in line]
        assert [line["step"] for line in lines] == [4, 5, 6]
        assert lines[0]["loss"] == pytest.approx(losses(before)[3], rel=0.05)


# ---- islands that come and go ----


def dies_in_call(owner, name, number):
    """In the so-manieth call of a method of islands."""

    def at_start():
        method, calls = getattr(owner, name), []

        def call_or_die(*args, **kwargs):
            calls.append(name)
            if len(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args, **kwargs)

        setattr(owner, name, call_or_die)

    return at_start


DEATHS = {
    "in a step": die_at(4),
    "in an exchange": dies_in_call(Transport, "receive", 3),
    "before it says that it has all": dies_in_call(Member, "finish", 2),
}


@pytest.mark.many  # one dies and comes back in test_island_shares.py, and in an exchange in tests/unit/islands
@pytest.mark.parametrize("at_start", DEATHS.values(), ids=DEATHS)
def test_the_others_go_on_where_an_island_dies_and_it_comes_back(tmp_path, at_start):
    sign, last = tmp_path / "is there", tmp_path / "again"
    keys = (*SHORT, "train.max_steps=18", "islands.every=3", "data.lanes=24", "checkpoint=none")
    with served() as address:
        own = [overrides_of(address, index, 3, *keys) for index in range(3)]
        folders = [tmp_path / f"island-{index}" for index in range(2)]
        islands = [Island(folder, 1, *own[index], at_start=wait_at(10, sign)) for index, folder in enumerate(folders)]
        mortal = Island(tmp_path / "mortal", 1, *own[2], at_start=at_start)
        assert "died without a word" in mortal.wait()
        # After step 9: on a busy machine the others may be slower than it is back.
        while sum("islands/members" in line for line in read_lines(RunFolder(folders[0]).metrics)) < 3:
            assert islands[0].process.is_alive()
            time.sleep(0.1)
        islands.append(Island(last, 1, *own[2], at_start=shows(sign)))
        failures = [island.wait() for island in islands]
        for island in (*islands, mortal):
            island.kill()
    assert failures == [None] * 3
    found = [weights(folder) for folder in (*folders, last)]
    assert difference(found[0], found[1]) == 0
    assert difference(found[2], found[1]) == 0
    lines = [line for line in read_lines(RunFolder(folders[0]).metrics) if "islands/members" in line]
    # After steps 3, 6, ..., 18.
    assert [line["islands/members"] for line in lines] in ([2, 2, 2, 2, 3, 3], [3, 2, 2, 2, 3, 3])
    # It came back with the state of another, and so at its step.
    steps = [line["step"] for line in read_lines(RunFolder(last).metrics) if "loss" in line]
    assert steps == list(range(13, 19))


def test_an_island_that_stood_still_is_left_and_comes_back_in_the_same_process(tmp_path):
    sign, pid = tmp_path / "has left", tmp_path / "pid"

    def stand_still(now):
        if now == 4 and not pid.exists():
            pid.write_text(f"{os.getpid()}")
            os.kill(os.getpid(), signal.SIGSTOP)

    folders = [tmp_path / f"island-{index}" for index in range(2)]
    keys = (*SHORT, "train.max_steps=18", "islands.every=3", "checkpoint=none")
    with served(silent_seconds=2) as address:
        own = [overrides_of(address, index, 2, *keys) for index in range(2)]
        going = Island(folders[0], 1, *own[0], at_start=wait_at(10, sign))
        stopped = Island(folders[1], 1, *own[1], at_start=before_steps(stand_still))
        while not any(line.get("islands/members") == 1 for line in read_lines(RunFolder(folders[0]).metrics)):
            assert going.process.is_alive()
            time.sleep(0.2)
        os.kill(int(pid.read_text()), signal.SIGCONT)
        sign.touch()
        ends = [going.wait(), stopped.wait()]
        going.kill()
        stopped.kill()
    assert ends == [None, None]
    assert difference(weights(folders[0]), weights(folders[1])) == 0
    steps = [line["step"] for line in read_lines(RunFolder(folders[1]).metrics) if "loss" in line]
    # It comes at the end of its round, and goes on at that of the other.
    assert steps[:5] == [1, 2, 3, 4, 5]
    assert steps[5:] in (list(range(9, 19)), list(range(12, 19)))


def sends(change):
    """Something else in place of what it has learned."""

    def at_start():
        encode = transport.encode
        transport.encode = lambda codec, values: change(encode(codec, values))
        rounds.is_finite = lambda values: True

    return at_start


BAD_PARTS = {
    "too short": (lambda content: content[:-4], "bytes are not"),
    "not finite": (lambda content: np.full(len(content) // 4, np.nan, np.float32).tobytes(), "not finite"),
}


@pytest.mark.parametrize("bad", always(["not finite"], BAD_PARTS))
def test_an_island_whose_parts_cannot_be_used_is_left_out_and_then_ended(tmp_path, bad):
    change, why = bad
    keys = (*SHORT, "train.max_steps=9", "islands.every=3", "checkpoint=none")
    log = tmp_path / "log"
    with served(log) as address:
        own = [overrides_of(address, index, 2, *keys) for index in range(2)]
        honest = Island(tmp_path / "honest", 1, *own[0])
        other = Island(tmp_path / "other", 1, *own[1], at_start=sends(change))
        ends = [honest.wait(), other.wait()]
        honest.kill()
        other.kill()
    assert ends[0] is None
    assert "the server has ended this island" in ends[1]
    lines = [line for line in read_lines(RunFolder(tmp_path / "honest").metrics) if "islands/members" in line]
    assert [line["islands/members"] for line in lines] == [1, 1, 1]
    said = [line for line in log.read_text().splitlines() if "island 1 is left out of the exchange" in line]
    assert len(said) == 3
    assert why in said[0]
    # Each was tried twice.
    assert log.read_text().count("is aborted") == 3
