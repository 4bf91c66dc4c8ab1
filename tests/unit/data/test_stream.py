"""The stream: one order for every number of ranks and workers, and a cursor that finds any place again."""

import collections
import gc
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hfdist.config.data import Packing, WeightChange
from hfdist.data import Cursor, TokenStream, build_held_out, count_steps, open_corpus, report
from hfdist.data.order.records import Status
from hfdist.data.stream import read_ahead
from hfdist.data.stream.worker_deaths import WorkerRegistry, system_memory
from hfdist.data.tokenization.text_encoder import Encoder, text_digest
from hfdist.errors import CheckpointError, ConfigError, DataError, ResourceError
from hfdist.verify.audit.ledger_sums import LedgerSums
from tests.unit.data.corpora import texts, tokenizer
from tests.unit.data.streams import PACKINGS, Run, assert_equal, memory_config, memory_corpus

GLOBAL_BATCH, STEPS = 12, 9


class Recorder:
    """A ledger in memory."""

    def __init__(self):
        self.records = collections.defaultdict(list)

    def add(self, lane, records, problems):
        self.records[lane].append(records)

    def go_back(self, sequences):
        pass


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return memory_config(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def corpus(config):
    return memory_corpus(config)


@pytest.fixture(scope="module")
def reference(corpus, config):
    """Global batches of an uninterrupted run, for each packing."""
    batches = {}
    for packing in PACKINGS:
        config.packing = packing
        run = Run(corpus, config, 1)
        batches[packing] = [run.step() for _ in range(STEPS)]
    config.packing = Packing.concat
    return batches


@pytest.fixture
def set_config(config, monkeypatch):
    return lambda **values: [monkeypatch.setattr(config, name, value) for name, value in values.items()]


@pytest.fixture(params=PACKINGS, ids=lambda packing: packing.value)
def packing(request, set_config):
    set_config(packing=request.param)
    return request.param


@pytest.mark.parametrize(
    ("packing", "data_size", "workers"),
    [(Packing.concat, 3, 0), (Packing.concat, 2, 2), (Packing.best_fit, 4, 0), (Packing.none, 2, 2)],
    indirect=["packing"],
)
def test_global_batches_do_not_depend_on_ranks_and_workers(
    corpus, config, reference, packing, data_size, workers, set_config
):
    set_config(workers=workers)
    run = Run(corpus, config, data_size)
    for expected in reference[packing]:
        assert_equal(run.step(), expected)


def is_in_first_epoch(run):
    return any(state.pools[0].place.epoch == 0 for state in Cursor.from_json(run.state()).lanes.values())


def test_second_epochs_and_second_runs_tokenize_nothing(tmp_path, monkeypatch):
    config = memory_config(tmp_path)
    corpus = memory_corpus(config)
    first = Run(corpus, config, 2)
    while is_in_first_epoch(first):
        last = first.step()

    def refuse(self, texts):
        raise AssertionError("it tokenizes again")

    monkeypatch.setattr("hfdist.data.tokenization.text_encoder.Encoder.encode", refuse)
    for _ in range(5):
        first.step()
    # Other lanes and another seed read other blocks: tokens are kept by row.
    config.seed, config.lanes = 7, 4
    second = Run(corpus, config, 4)
    for _ in range(20):
        second.step()
    # Another held-out share, too, since what is kept is the hash of the text.
    config.eval_fraction = 0.3
    assert Run(memory_corpus(config), config, 1).step().keys() == last.keys()


def test_single_documents_come_with_a_mask_and_are_filled_up_to_the_longest_of_their_batch(tmp_path):
    config = memory_config(tmp_path, packing=Packing.none, sequence_length=4096, lanes=4)
    batch = next(iter(TokenStream(memory_corpus(config), tokenizer(), config).loader(batch_size=4)))
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    lengths = (batch["labels"] != -100).sum(dim=1) + 1
    assert lengths.max() <= batch["input_ids"].shape[1] < lengths.max() + 8


def test_auto_is_settled_by_the_stream(tmp_path):
    streams = [
        TokenStream(memory_corpus(config), tokenizer(), config)
        for config in (memory_config(tmp_path, packing=one) for one in (Packing.auto, Packing.best_fit))
    ]
    assert streams[0].config == streams[1].config
    assert streams[0].identity == streams[1].identity
    assert_equal(*(next(iter(stream.loader(batch_size=4))) for stream in streams))


def test_what_loader_processes_inherit_is_kept_out_of_their_garbage_collections(tmp_path, monkeypatch):
    def count(item):
        (tmp_path / "frozen").write_text(str(gc.get_freeze_count()))
        return item

    # torch calls it in the loader process.
    monkeypatch.setattr(read_ahead, "keep_arrays", count)
    config = memory_config(tmp_path, workers=1)
    # Whatever other tests have done in this process.
    gc.unfreeze()
    next(iter(TokenStream(memory_corpus(config), tokenizer(), config).loader(batch_size=1)))
    assert int((tmp_path / "frozen").read_text()) > 0


def test_the_global_random_state_is_left_alone(corpus, config, set_config):
    set_config(workers=1)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    Run(corpus, config, 1).step()
    assert torch.equal(torch.get_rng_state(), before)


class TestMixtures:
    def test_sequences_come_by_weight_each_from_one_source_and_weights_change_at_their_step(self, tmp_path):
        weights = {"a": 0.75, "b": 0.25}
        config = memory_config(tmp_path, weights=weights, anneal=[WeightChange(step=8, weights={"a": 0.5, "b": 0.5})])
        corpus = memory_corpus(config)
        assert [pool.name for pool in corpus.pools] == ["a", "b"]
        ledger = Recorder()
        run = Run(corpus, config, 3, ledger=lambda: ledger)
        for _ in range(16):
            run.step()
        shares = collections.Counter()
        for records in ledger.records.values():
            for number, sequence in enumerate(records):
                assert len(set(sequence["pool"])) == 1
                assert {corpus.origin(d).source for d in sequence["document"]} == {"ab"[sequence["pool"][0]]}
                shares["before" if number < 8 else "after", "ab"[sequence["pool"][0]]] += 1
        assert shares == {("before", "a"): 72, ("before", "b"): 24, ("after", "a"): 48, ("after", "b"): 48}
        total = {pool.name: pool for pool in report(Cursor.from_json(run.state()), run.streams[0].plan)}
        assert total["a"].sequences == 120
        assert total["a"].share == 120 / 192
        assert total["a"].filled == 1.0
        assert 0 < total["a"].epochs < 1

    def test_passes_are_those_of_the_audit(self, tmp_path, packing):
        """Also of a source in whose first window the run still stands."""
        config = memory_config(tmp_path, weights={"a": 0.7, "b": 0.3}, packing=packing, lanes=4)
        corpus, ledger = memory_corpus(config), Recorder()
        run = Run(corpus, config, 2, ledger=lambda: ledger)
        for _ in range(6):
            run.step()
        totals = LedgerSums(corpus)
        for records in ledger.records.values():
            totals.add(np.concatenate(records))
        audited = {line.split()[0]: line.split()[-1] for line in str(totals).splitlines()[1:]}
        cursor = Cursor.from_json(run.state())
        told = {pool.name: f"{pool.epochs:.2f}" for pool in report(cursor, run.streams[0].plan)}
        assert told == audited
        assert float(told["b"]) > 0

    def test_a_source_with_a_limit_is_read_exactly_once_and_the_others_take_its_share(self, tmp_path, packing):
        config = memory_config(tmp_path, weights={"a": 1.0, "b": 1.0}, epochs={"a": 1}, packing=packing)
        ledger = Recorder()
        corpus = memory_corpus(config, a=texts()[:20], b=texts()[60:])
        run = Run(corpus, config, 2, ledger=lambda: ledger)
        # More than its documents have.
        for _ in range(200):
            last = run.step()
        tokens, fates = collections.Counter(), {}
        for records in ledger.records.values():
            for record in np.concatenate(records):
                if record["pool"] == 0:
                    tokens[int(record["document"])] += int(record["num_tokens"])
                    fates[int(record["document"])] = record["fate"]
        most = 32 if packing is Packing.none else 10**9
        given = [corpus.text(document) for document in range(20)]
        for document, (text, encoded) in enumerate(zip(given, Encoder(tokenizer()).encode(given), strict=True)):
            is_held_out = corpus.is_held_out(text_digest(text))
            assert fates[document] == (Status.held_out if is_held_out else Status.trained)
            assert tokens[document] == (0 if is_held_out else min(len(encoded), most))
        assert (last["labels"] != -100).any(dim=1).all()

    def test_a_stream_knows_when_it_has_ended_on_any_number_of_ranks(self, tmp_path, packing):
        """With fewer sequences in a batch than lanes, a batch of lanes that have ended is not yet the end."""
        config = memory_config(tmp_path, epochs={"a": 1, "b": 1}, packing=packing)
        corpus, targets = memory_corpus(config), []
        run, alone = (Run(corpus, config, size, global_batch=2) for size in (2, 1))
        while not all(stream.has_ended for stream in run.streams):
            batch = run.step()
            assert_equal(batch, alone.step())
            targets.append(bool((batch["labels"] != -100).any()))
        assert targets[-1]
        assert not all(targets)
        again = Run(corpus, config, 1, run.state(), global_batch=2)
        for _ in range(6):
            assert (run.step()["labels"] == -100).all()
        assert (again.step()["labels"] == -100).all()


class TestQuarantine:
    @pytest.fixture
    def taken_out(self, corpus, config):
        """The first training document of a lane."""
        order = TokenStream(corpus, tokenizer(), config).plan.orders[0].documents(0, 5).tolist()
        return next(n for n in order if not corpus.is_held_out(text_digest(texts()[n])))

    def test_everything_else_stays_where_it_was(self, corpus, config, packing, taken_out, set_config):
        name = str(corpus.origin(taken_out))
        assert name == (f"a:a:{taken_out}" if taken_out < 60 else f"b:b:{taken_out - 60}")
        set_config(quarantine=[name])
        plain, other = Run(corpus, config, 1), Run(memory_corpus(config), config, 2)
        num_changed = 0
        for _ in range(60):
            before, after = plain.step(), other.step()
            changed = before["input_ids"] != after["input_ids"]
            num_changed += int(changed.sum())
            assert (after["labels"][changed] == -100).all()
            if packing is Packing.concat:
                assert torch.equal(before["position_ids"], after["position_ids"])
        tokens = Encoder(tokenizer()).encode([texts()[taken_out]])[0]
        assert num_changed >= min(len(tokens), 32) - 1

    def test_a_row_that_is_not_there_is_named(self, config, set_config):
        set_config(quarantine=["a:a:60"])
        with pytest.raises(ConfigError, match="no such row"):
            memory_corpus(config)


PLACES_THAT_CANNOT_BE = [[0, 10**9, 0, 0, 0, 0], [0, -1, 0, 0, 0, 0], [-1, 0, 0, 0, 0, 0]]


class TestCursorChecks:
    def test_other_data_settings_are_refused(self, corpus, config, set_config):
        state = Run(corpus, config, 1).state()
        set_config(sequence_length=16)
        with pytest.raises(CheckpointError, match="have changed since this checkpoint"):
            Run(corpus, config, 1, state)

    @pytest.mark.parametrize(
        "damage",
        [
            {"format": 9},
            {"places": "x"},
            {"places": [[0]]},
            {"samples": None},
            {"samples": -12},
            {"places": [[0, "0", [0] * 6], [1, "0", [0] * 6]]},
            *({"places": [[lane, "0", place] for lane in range(12)]} for place in PLACES_THAT_CANNOT_BE),
            {"places": [[lane, "x", [0] * 6] for lane in range(12)]},
            {"places": [[lane, "f" * 17, [0] * 6] for lane in range(12)]},
            {"places": [[lane, "0"] for lane in range(12)]},
            {"places": [[lane, "0", [0] * 5] for lane in range(12)]},
            {"lanes": 0},
            {"next": 12},
            {"sequences": [1]},
            {"sequences": [-1] * 12},
            {"shares": 1},
            {"shares": {"count": 2, "lanes": []}},
            {"shares": {"count": 2, "lanes": [[lane, 0, [[0]]] for lane in range(12)]}},
        ],
    )
    def test_a_damaged_one_is_refused(self, corpus, config, damage):
        stream = TokenStream(corpus, tokenizer(), config)
        with pytest.raises(CheckpointError, match=r"cursor (is damaged|has another format)"):
            stream.load_state_dict(stream.state_dict() | damage)

    def test_missing_lanes_are_refused(self, corpus, config):
        cursors = [Cursor.from_json(stream.state_dict()) for stream in Run(corpus, config, 2).streams]
        with pytest.raises(CheckpointError, match="lanes are missing"):
            Cursor.merge(cursors[:1])


class TestWithoutTheTrainer:
    """A plain IterableDataset, for any loop."""

    def test_sequences_one_by_one_are_those_of_the_batches(self, corpus, config, reference):
        stream = TokenStream(corpus, tokenizer(), config)
        sequences = iter(stream)
        for batch in reference[Packing.concat][:3]:
            rows = [next(sequences) for _ in range(GLOBAL_BATCH)]
            assert torch.equal(torch.stack([row["input_ids"] for row in rows]), batch["input_ids"])
        assert stream.state_dict()["samples"] == 3 * GLOBAL_BATCH

    def test_a_torch_dataloader_with_workers_gives_every_sequence_once(self, tmp_path):
        config = memory_config(tmp_path, epochs={"a": 1}, token_cache_bytes=0)
        corpus = memory_corpus(config, a=texts()[:20])
        loader = DataLoader(
            TokenStream(corpus, tokenizer(), config), batch_size=None, num_workers=3, multiprocessing_context="fork"
        )
        rows = sorted(batch["input_ids"].tolist() for batch in loader)
        alone = sorted(batch["input_ids"].tolist() for batch in TokenStream(corpus, tokenizer(), config))
        assert rows == alone

    def test_workers_that_do_not_divide_the_lanes_are_refused(self, corpus, config, monkeypatch):
        # What torch says in a worker. Real ones that fail are waited for by it, five seconds each.
        worker = SimpleNamespace(id=0, num_workers=5)
        monkeypatch.setattr("hfdist.data.stream.token_stream.get_worker_info", lambda: worker)
        with pytest.raises(ConfigError, match="do not divide the lanes"):
            next(iter(TokenStream(corpus, tokenizer(), config)))


class TestHeldOut:
    def test_it_has_its_share_of_the_documents(self, corpus):
        share = np.mean([corpus.is_held_out(text_digest(f"document {n}")) for n in range(5000)])
        assert share == pytest.approx(0.1, abs=0.02)

    def test_it_is_packed_from_held_out_documents_and_cached(self, corpus, config):
        held_out = build_held_out(corpus, tokenizer(), config)
        assert len(held_out) == config.eval_sequences
        text = " ".join(t for t in texts() if corpus.is_held_out(text_digest(t)))
        start = held_out[0]["input_ids"][held_out[0]["position_ids"].argmin() : 8]
        assert tokenizer().decode(start) in text
        again = build_held_out(corpus, tokenizer(), config)
        assert all(torch.equal(held_out[k]["input_ids"], again[k]["input_ids"]) for k in range(len(again)))
        (kept,) = (Path(config.cache_dir) / "held_out").glob("*.npy")
        kept.write_bytes(kept.read_bytes()[:-100])
        anew = build_held_out(corpus, tokenizer(), config)
        assert all(torch.equal(held_out[k]["input_ids"], anew[k]["input_ids"]) for k in range(len(anew)))

    def test_it_is_packed_anew_without_what_is_quarantined(self, tmp_path):
        config = memory_config(tmp_path, eval_sequences=10_000)
        corpus = memory_corpus(config)
        before = build_held_out(corpus, tokenizer(), config)
        number = next(n for n in range(60) if corpus.is_held_out(text_digest(corpus.text(n))))
        config.quarantine = [str(corpus.origin(number))]
        after = build_held_out(memory_corpus(config), tokenizer(), config)
        assert any((after[k]["labels"] == -100).sum() > (before[k]["labels"] == -100).sum() for k in range(len(after)))

    def test_none_where_no_fraction_is_held_out(self, corpus, config, set_config):
        set_config(eval_fraction=0)
        assert build_held_out(corpus, tokenizer(), config) is None


def counted(corpus, config, at_most=None):
    return count_steps(corpus, tokenizer(), config, global_batch_size=GLOBAL_BATCH, at_most=at_most)


def taken(corpus, config, data_size):
    """Steps that a run takes: batches with a target, until all ranks have ended."""
    run, steps = Run(corpus, config, data_size, global_batch=GLOBAL_BATCH), 0
    while not all(stream.has_ended for stream in run.streams):
        steps += bool((run.step()["labels"] >= 0).any())
    return steps


@pytest.mark.parametrize(("packing", "epochs"), [(Packing.concat, 2), (Packing.best_fit, 1), (Packing.none, 1)])
def test_a_run_takes_just_as_many_on_any_number_of_ranks(tmp_path, packing, epochs):
    config = memory_config(tmp_path, epochs={"a": epochs, "b": epochs}, packing=packing)
    corpus = memory_corpus(config)
    steps = counted(corpus, config)
    assert steps > epochs
    assert {taken(corpus, config, data_size) for data_size in (1, 4)} == {steps}


def test_they_are_counted_once(tmp_path, caplog):
    caplog.set_level("INFO")
    config = memory_config(tmp_path, epochs={"a": 1, "b": 1})
    corpus = memory_corpus(config)
    first = counted(corpus, config)
    assert "counting the steps" in caplog.text
    caplog.clear()
    assert counted(corpus, config) == first
    assert not caplog.text
    other = memory_config(tmp_path, epochs={"a": 1, "b": 1}, seed=1)
    counted(memory_corpus(other), other)
    assert "counting the steps" in caplog.text


def test_other_ends_are_counted_anew(tmp_path):
    """In one cache: the same stream, but for its end."""
    counts = []
    for epochs in (1, 2):
        config = memory_config(tmp_path, epochs={"a": epochs, "b": epochs})
        counts.append(counted(memory_corpus(config), config))
    assert counts[0] < counts[1]
    assert counted(memory_corpus(config), config, at_most=2) == 2 < counts[1]


def test_data_without_a_target_are_refused(tmp_path):
    config = memory_config(tmp_path, epochs={"a": 1}, eval_fraction=0.0)
    corpus = open_corpus(config, {"a": datasets.Dataset.from_dict({"text": [""] * 20})})
    with pytest.raises(DataError, match="nothing to learn from"):
        counted(corpus, config)


def workers_of_this_process():
    return [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]


@pytest.mark.parametrize("rank_is", ["computing", "waiting"])
def test_a_killed_worker_is_named_with_its_lanes_and_its_memory(tmp_path, rank_is):
    config = memory_config(tmp_path, workers=2, lanes=4)
    stream = TokenStream(memory_corpus(config), tokenizer(), config)
    batches = iter(stream.loader(batch_size=4))
    next(batches)
    _, second = workers_of_this_process()[-2:]
    with pytest.raises(ResourceError) as caught:
        os.kill(second, signal.SIGKILL)
        if rank_is == "computing":
            for _ in range(1000):
                time.sleep(0.01)
        else:
            while True:
                next(batches)
    message = str(caught.value)
    assert caught.value.exit_code == 7
    assert f"pid {second}" in message or f"pid(s) {second}" in message
    assert re.search(r"worker 1 of 2, which reads lanes 1, 3, ", message)
    assert int(re.search(r"3, ([\d,]+) MiB when last seen", message)[1].replace(",", "")) > 20
    assert re.search(r"the machine has [\d,]+ MiB left of [\d,]+ MiB", message)
    for key in re.findall(r"data\.(\w+)", caught.value.hint):
        assert hasattr(config, key)
    batches.close()


def test_what_torch_said_first_about_a_death_is_the_cause():
    first, second = "DataLoader worker (pid 1) is killed by signal: Killed.", "DataLoader worker (pid(s) 1) exited"
    with pytest.raises(ResourceError) as caught, WorkerRegistry(1, str).explain_deaths():
        try:
            with WorkerRegistry(1, str).explain_deaths():
                raise RuntimeError(first)
        except ResourceError as error:
            raise RuntimeError(second) from error
    cause = caught.value.__cause__
    assert (str(cause), cause.__cause__) == (first, None)


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="another"), WorkerRegistry(1, str).explain_deaths():
        raise RuntimeError("another")


def test_the_control_group_is_read(tmp_path, monkeypatch):
    def write(folder, **texts):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / f"memory.{name}").write_text(text)

    own = tmp_path / "own"
    own.write_text("1:name=x:/\n0::/\n")
    write(tmp_path, max="1048576000", current="524288000", events="oom 3\noom_kill 2")
    monkeypatch.setattr("hfdist.cgroup._ROOT", tmp_path)
    monkeypatch.setattr("hfdist.cgroup._OWN", own)
    assert "uses 500 MiB of 1,000 MiB, its processes killed for memory so far: 2" in system_memory()
    write(tmp_path, max="max")
    assert "group" not in system_memory()
    write(tmp_path / "job", max="1048576000", current="1048576", events="oom_kill 1")
    own.write_text("0::/job\n")
    assert "uses 1 MiB of 1,000 MiB, its processes killed for memory so far: 1" in system_memory()
