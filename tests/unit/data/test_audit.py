"""The audit: true ledgers pass in every packing, and each kind of planted damage is found and named."""

from __future__ import annotations

import dataclasses
import os
import signal
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from hfdist.config.cli.audit import parse_request
from hfdist.config.data import BadRows, Packing, TooLong, WeightChange
from hfdist.data import Cursor, Ledger
from hfdist.data.order.lane_state import Place
from hfdist.data.order.records import RECORD, Status
from hfdist.data.order.runs import Runs
from hfdist.data.order.shuffle import LaneOrder
from hfdist.errors import ConfigError, DataError, ResourceError
from hfdist.verify.audit import exactly_once, lane_audit
from hfdist.verify.audit.discrepancies import Discrepancy
from hfdist.verify.audit.exactly_once import Audit
from hfdist.verify.audit.past_run import PastRun, read_ledger
from hfdist.verify.audit.pool_audit import PoolAudit
from hfdist.verify.audit.step_contents import describe_step
from tests.unit.data.corpora import tokenizer
from tests.unit.data.streams import PACKINGS, Run, memory_config, memory_corpus

LANES = GLOBAL_BATCH = 12
ROWS = {
    "a": ["", *(f"{n} " * (1 + n % 23) for n in range(89))],
    "b": [f"b{n}, " * (1 + n % 41) for n in range(69)] + ["long " * 300],
    "c": [f"c {n} " * (1 + n % 17) for n in range(120)],
}
SETTINGS = {
    "one": {},
    "weights": {"weights": {"a": 2.0, "b": 1.0}, "anneal": [WeightChange(step=10, weights={"a": 1.0, "b": 3.0})]},
    "limits": {"weights": {"a": 1.0, "b": 3.0}, "epochs": {"a": 2, "b": 1}},
    "one goes on": {"weights": {"a": 2.0, "b": 2.0, "c": 1.0}, "epochs": {"a": 2, "b": 1}},
}


class Past:
    """A run of 30 steps, saved now and then, killed twice, each time going on with other ranks; what is left of it."""

    def __init__(self, folder, packing, name, start=None):
        self.config = memory_config(folder, packing=packing, sequence_length=64, **SETTINGS[name])
        self.corpus = memory_corpus(self.config, **{key: ROWS[key] for key in SETTINGS[name].get("weights", "ab")})
        self.cursors = {}
        step, state = 0, start
        for data_size, saves, killed_after in ((1, [7, 11], 3), (3, [16], 2), (4, [30], 0)):
            run = Run(
                self.corpus,
                self.config,
                data_size,
                state,
                ledger=lambda: Ledger(folder / "ledger", self.corpus, BadRows.error),
            )
            for save in saves:
                for _ in range(save - step):
                    run.step()
                step = save
                run.flush()
                state = run.state()
                self.cursors[step + self.before(start)] = Cursor.from_json(state)
            for _ in range(killed_after):
                run.step()
            run.flush()
        self.plan, self.identity = run.streams[0].plan, run.state()["identity"]
        self.ledger = read_ledger(folder / "ledger", LANES)
        self.state = state

    @staticmethod
    def before(start):
        return 0 if start is None else start["samples"] // GLOBAL_BATCH

    def audit(self, ledger=None, cursors=None, processes=1):
        return Audit(
            self.ledger if ledger is None else ledger,
            self.corpus,
            self.plan,
            (self.cursors if cursors is None else cursors).items(),
            identity=self.identity,
            global_batch_size=GLOBAL_BATCH,
        ).check(processes)


@pytest.fixture(scope="module")
def past(tmp_path_factory):
    """Gives a run; each is made once."""
    return cache(lambda packing, name: Past(tmp_path_factory.mktemp("run"), packing, name))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_true_ledgers_pass_with_and_without_checkpoints(past, packing, name):
    run = past(packing, name)
    audited, without = run.audit(), run.audit(cursors={})
    assert audited.passed, str(audited.discrepancies)
    assert without.passed, without.discrepancies
    assert (audited.first_sample, audited.num_sequences) == (0, 30 * GLOBAL_BATCH)
    assert audited.totals.tokens == sum(int(records["num_tokens"].sum()) for records in run.ledger)
    assert any(Status.held_out in records["fate"] for records in run.ledger)
    assert max(int(records["epoch"].max()) for records in run.ledger) >= 1


@pytest.mark.parametrize("number", [2**50, -(2**50)])
def test_a_number_that_cannot_be_takes_no_memory(past, number):
    run = past(Packing.concat, "one")
    ledger = [own.copy() for own in run.ledger]
    ledger[3]["sequence"][-1 if number > 0 else 0] = number
    with pytest.raises(DataError, match="do not belong together"):
        run.audit(ledger, cursors={})


def test_the_numbers_of_an_island_count_the_lanes_of_others(past, monkeypatch):
    run = past(Packing.concat, "one")
    ledger = [own if lane == 0 else own[:0] for lane, own in enumerate(run.ledger)]
    # Its own records alone are too few.
    monkeypatch.setattr(exactly_once, "_MOST_MISSING", -16 * len(ledger[0]))
    assert run.audit(ledger, cursors={}).num_sequences


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_ledger_that_ends_anywhere_passes_without_checkpoints(past, packing):
    """A source with a limit that is inside its last document has not come to its end."""
    run = past(packing, "one goes on")
    for samples in range(LANES, 30 * GLOBAL_BATCH, 31):
        cut = [own[own["sequence"] * LANES + lane < samples] for lane, own in enumerate(run.ledger)]
        audited = run.audit(cut, cursors={})
        assert audited.passed, (samples, audited.discrepancies)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_run_from_anothers_checkpoint_passes_and_is_known(past, packing, tmp_path):
    run = Past(tmp_path, packing, "limits", start=past(packing, "limits").cursors[7].to_json())
    audited = run.audit()
    assert audited.passed, audited.discrepancies
    assert audited.first_sample == 7 * GLOBAL_BATCH
    # What is missing after its beginning is missing all the same.
    lane = max(range(LANES), key=lambda n: len(run.ledger[n]))
    ledger = [records.copy() for records in run.ledger]
    ledger[lane] = ledger[lane][ledger[lane]["sequence"] != ledger[lane]["sequence"][-1] - 3]
    assert not run.audit(ledger).passed


def test_several_processes_find_what_one_finds(past):
    run = past(Packing.concat, "weights")
    ledger = [records.copy() for records in run.ledger]
    ledger[LANE], _ = double(ledger[LANE], trained(ledger[LANE], 4))
    ledger[LANE + 1], _ = remove(ledger[LANE + 1], trained(ledger[LANE + 1], 2))
    one, three = (run.audit(ledger, processes=processes) for processes in (1, 3))
    assert {Discrepancy.again, Discrepancy.never, Discrepancy.digest} <= one.discrepancies.counts.keys()
    assert str(three.discrepancies) == str(one.discrepancies)
    assert str(three.totals) == str(one.totals)
    assert three.totals.epochs == one.totals.epochs
    assert run.audit(processes=3).passed


def test_a_process_that_is_killed_ends_the_audit(past, monkeypatch):
    rank = os.getpid()

    def die(*_, **__):
        assert os.getpid() != rank
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(lane_audit, "PoolAudit", die)
    with pytest.raises(ResourceError) as caught:
        past(Packing.concat, "one").audit(processes=2)
    assert caught.value.where.startswith("processes: worker ")
    assert "which audits" in caught.value.where
    assert caught.value.hint == "more memory, or processes=1"


LANE = 5


def trained(records, place):
    """Index of a whole document's record, `place` of them from the beginning."""
    is_whole = (records["num_tokens"] == records["of_tokens"]) & (records["fate"] == Status.trained)
    return int(np.flatnonzero(is_whole)[place])


def remove(records, at):
    return np.delete(records, at), (Discrepancy.never, at)


def remove_one_that_is_held_out(records, at):
    at = int(np.flatnonzero(records["fate"] == Status.held_out)[1])
    return np.delete(records, at), (Discrepancy.never, at)


def double(records, at):
    return np.insert(records, at, records[at]), (Discrepancy.again, at)


def swap(records, at):
    """A document and one far after it in the same epoch and pool."""
    own = (records["epoch"] == records["epoch"][at]) & (records["pool"] == records["pool"][at])
    other = int(np.flatnonzero(own & (records["sequence"] > records["sequence"][at]))[-1])
    records[[at, other]] = records[[other, at]]
    return records, (Discrepancy.numbering, None)


def replace(records, at):
    """By a document that is another lane's, or at another place of this one."""
    document = records["document"][at].copy()
    records["document"][at] += 1 if document % 80 < 79 else -1
    return records, (Discrepancy.never, document)


def change(kind, is_named=True, **changes):
    """Change fields of a record."""

    def damage(records, at):
        for name, alter in changes.items():
            records[name][at] = alter(records[name][at])
        return records, (kind, at if is_named else None)

    return damage


def remove_a_sequence(records, at):
    return records[records["sequence"] != records["sequence"][at]], (Discrepancy.numbering, None)


DAMAGES = {
    "removed": remove,
    "held-out one removed": remove_one_that_is_held_out,
    "doubled": double,
    "swapped": swap,
    "another epoch": change(Discrepancy.never, epoch=lambda epoch: epoch + 1),
    "epoch far away": change(Discrepancy.never, epoch=lambda _: 60_000),
    "replaced": replace,
    "begins later": change(Discrepancy.in_part, first_token=lambda first: first + 1, num_tokens=lambda num: num - 1),
    "ends earlier": change(Discrepancy.in_part, num_tokens=lambda num: num - 1),
    "another pool": change(Discrepancy.never, pool=lambda pool: pool ^ 1),
    "no such pool": change(Discrepancy.unreadable, pool=lambda _: 7),
    "no such document": change(Discrepancy.unreadable, is_named=False, document=lambda _: 10**9),
    "sequence removed": remove_a_sequence,
}


@pytest.mark.parametrize("packing", PACKINGS)
class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
    def test_it_is_found_and_named(self, past, packing, damage):
        run = past(packing, "weights")
        ledger = [records.copy() for records in run.ledger]
        at = trained(ledger[LANE], 4)
        ledger[LANE], (kind, named) = damage(ledger[LANE], at)
        if isinstance(named, int):
            named = run.ledger[LANE]["document"][named]
        with_checkpoints, without = run.audit(ledger).discrepancies, run.audit(ledger, {}).discrepancies
        assert Discrepancy.digest in with_checkpoints.counts
        for discrepancies in (with_checkpoints, without):
            assert kind in discrepancies.counts, discrepancies
            names = " | ".join(discrepancies.names[kind])
            assert f"lane {LANE}" in names
            if named is not None:
                assert f"{run.corpus.origin(int(named))}, lane {LANE}" in names
            assert f"{kind.value}: {discrepancies.counts[kind]}" in str(discrepancies)

    def test_order_is_free_inside_a_window_only(self, packing):
        order = LaneOrder(Runs.of([[5000]]), lanes=1, key=(0,))
        plan = SimpleNamespace(
            orders=[order],
            pools=[SimpleNamespace(epochs=None)],
            packing=packing,
            too_long=TooLong.split,
            shape=SimpleNamespace(length=64),
        )

        def found(records):
            discrepancies = SimpleNamespace(add_documents=lambda *args: len(args[1]) and noted.append(args))
            noted = []
            PoolAudit(
                records=records,
                plan=plan,
                pool=0,
                lane=0,
                place=Place(0, 4096, 0),
                begins_inside=False,
                discrepancies=discrepancies,
            ).check()
            return noted

        window = {Packing.concat: 1, Packing.best_fit: 1024, Packing.none: 64}[packing]
        records = np.zeros(4096, dtype=RECORD)
        records["sequence"] = np.arange(4096)
        records["num_tokens"] = records["of_tokens"] = 10
        documents = order.documents(0, 0)[:4096]
        records["document"] = documents.reshape(-1, window)[:, ::-1].ravel()
        assert found(records) == []
        records["document"] = documents
        records["document"][[100, 100 + window]] = documents[[100 + window, 100]]
        ((kind, named, _, sequences),) = found(records)
        assert (kind, sorted(named)) == (Discrepancy.misplaced, sorted(documents[[100, 100 + window]]))
        assert sorted(sequences) == [100, 100 + window]

    def test_a_changed_digest_or_place_of_a_checkpoint_is_named(self, past, packing):
        run = past(packing, "one")
        cursor = run.cursors[30]
        state = cursor.lanes[LANE]
        lanes = {**cursor.lanes, LANE: state._replace(digest=state.digest ^ 1)}
        discrepancies = run.audit(cursors={**run.cursors, 30: dataclasses.replace(cursor, lanes=lanes)}).discrepancies
        assert discrepancies.names == {Discrepancy.digest: [f"lane {LANE}, between steps 16 and 30"]}
        (progress,) = state.pools
        moved = progress._replace(place=progress.place._replace(offset=progress.place.offset + 1))
        lanes = {**cursor.lanes, LANE: state._replace(pools=(moved,))}
        discrepancies = run.audit(cursors={30: dataclasses.replace(cursor, lanes=lanes)}).discrepancies
        assert list(discrepancies.counts) == [Discrepancy.cursor]


def test_an_order_that_plans_a_document_twice_is_found(past, monkeypatch):
    run = past(Packing.concat, "one")
    (order,) = run.plan.orders
    double = SimpleNamespace(
        lane_length=order.lane_length,
        documents=lambda epoch, lane: np.where((d := order.documents(epoch, lane)) == 17, 18, d),
    )
    monkeypatch.setattr(run, "plan", dataclasses.replace(run.plan, orders=[double]))
    assert run.audit().discrepancies.names[Discrepancy.unplanned][:2] == ["a:a:17", "a:a:18"]
    # Twice in one lane, and none is left out.
    again = dict.fromkeys(range(LANES), 0) | {LANE: 1}
    double.documents = lambda epoch, lane: np.append(d := order.documents(epoch, lane), d[: again[lane]])
    assert Discrepancy.unplanned in run.audit().discrepancies.counts


def test_other_data_are_refused(past, monkeypatch):
    run = past(Packing.concat, "one")
    other = memory_corpus(run.config, **{**ROWS, "c": ["one more"]})
    monkeypatch.setattr(run, "identity", Run(other, run.config, 1).state()["identity"])
    with pytest.raises(DataError, match="have changed since the run"):
        run.audit()


def test_a_run_without_a_ledger_is_refused(tmp_path):
    with pytest.raises(DataError, match="no ledger") as caught:
        read_ledger(tmp_path / "ledger", LANES)
    assert "written with each checkpoint and at the end" in caught.value.allowed


class TestSteps:
    @pytest.fixture
    def run(self, past, tmp_path):
        run = past(Packing.best_fit, "weights")
        train, islands = SimpleNamespace(global_batch_size=GLOBAL_BATCH), SimpleNamespace(shares=1)
        config = SimpleNamespace(data=run.config, train=train, islands=islands)
        return PastRun(
            folder=tmp_path, config=config, ledger=run.ledger, corpus=run.corpus, tokenizer=tokenizer(), cursors=[]
        )

    def test_a_step_is_what_its_batch_held(self, run):
        again = Run(run.corpus, run.config.data, 1)
        batch = [again.step() for _ in range(7)][6]
        lines = list(describe_step(run, 7, shows_all_text=True))
        heads = [line for line in lines if line.startswith("sequence ")]
        assert [line.split()[1] for line in heads] == [str(n) for n in range(72, 84)]
        shown = "".join(line.removeprefix("      ") for line in lines if line.startswith("      "))
        end = tokenizer().eos_token_id
        read = [tokenizer().decode([i for i in row.tolist() if i != end]) for row in batch["input_ids"]]
        assert shown.replace("<|endoftext|>", "") == "".join(read)
        assert "data.quarantine=[" in lines[-1]

    def test_text_is_shortened_to_a_line(self, run):
        lines = list(describe_step(run, 7, shows_all_text=False))
        texts = [line for line in lines if line.startswith("      ")]
        assert texts
        assert all(len(line) <= 6 + 80 + 4 for line in texts)

    @pytest.mark.parametrize("shows_all_text", [True, False])
    def test_secrets_are_masked_over_lines_and_at_the_cut(self, run, monkeypatch, shows_all_text):
        key = "-----BEGIN PRIVATE KEY-----\nMIIEow\n-----END PRIVATE KEY-----"
        text = f"{'x ' * 30}hf_{'AbCdEfGhIj' * 3}\n{key}"
        monkeypatch.setattr(run.tokenizer, "decode", lambda *_, **__: text)
        said = "\n".join(describe_step(run, 7, shows_all_text=shows_all_text))
        assert "hf_" not in said
        assert "MII" not in said

    @pytest.mark.parametrize("step", [0, 33])
    def test_steps_that_are_not_there_are_refused(self, run, step):
        with pytest.raises(ConfigError, match="does not hold this step") as caught:
            list(describe_step(run, step, shows_all_text=False))
        assert caught.value.allowed.startswith("1 to 30;")

    @pytest.mark.parametrize(("field", "value"), [("fate", 99), ("document", 10**9), ("pool", 9)])
    def test_a_damaged_record_ends_in_an_error_that_names_its_place(self, run, field, value):
        ledger = [own.copy() for own in run.ledger]
        ledger[5][field][ledger[5]["sequence"] == 6] = value
        with pytest.raises(DataError, match="no run writes") as caught:
            list(describe_step(dataclasses.replace(run, ledger=ledger), 7, shows_all_text=False))
        assert "lane 5, sequence 6" in caught.value.where


class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ([], ["which run?"]),
            (["run.dir=runs/x"], ["there is no key `run.dir`", "run=runs/x"]),
            (["--step=3"], ["there is no key `--step`", "step=3"]),
            (["runs/x"], ["there is no such run", "found:   runs/x"]),
            (["run=RUNS/demp"], ["there is no such run", "run=RUNS/demo"]),
            (["run=RUNS/demo", "step=0"], ["no such value", "whole number"]),
            (["run=RUNS/demo", "step=1e3"], ["no such value", "found:   1e3"]),
            (["run=RUNS/demo", f"step={'9' * 5000}"], ["no such value", "whole number"]),
            (["run=RUNS/demo", "run=RUNS/other"], ["given twice"]),
            (["run=RUNS/demo,RUNS/demo"], ["no different runs", "islands"]),
            (["run=RUNS/demo,"], ["no different runs"]),
            (["run=RUNS/demo", "text=full"], ["text is shown of a step only"]),
            (["run=RUNS/demo", "processes=0"], ["no such value", "processes=2"]),
            (["run=RUNS/demo", "step=1", "processes=2"], ["read in one process", "without it"]),
            (["run=RUNS/demo", "step=1", "text=ful"], ["no such value", "text=full"]),
        ],
    )
    def test_mistakes_are_named(self, tmp_path, arguments, words):
        (tmp_path / "demo").mkdir()
        (tmp_path / "demo" / "config.yaml").touch()
        with pytest.raises(ConfigError) as caught:
            parse_request([argument.replace("RUNS", str(tmp_path)) for argument in arguments])
        for word in words:
            assert word.replace("RUNS", str(tmp_path)) in str(caught.value)

    def test_the_name_of_a_folder_may_hold_a_comma(self, tmp_path):
        for name in ("a,b", "a", "b"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.yaml").touch()
        assert parse_request([f"run={tmp_path}/a,b"]).runs == (tmp_path / "a,b",)
        assert parse_request([f"run={tmp_path}/a,{tmp_path}/b"]).runs == (tmp_path / "a", tmp_path / "b")

    def test_several_processes_are_refused(self, tmp_path, monkeypatch):
        (tmp_path / "config.yaml").touch()
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match="takes one process"):
            parse_request([f"run={tmp_path}"])
