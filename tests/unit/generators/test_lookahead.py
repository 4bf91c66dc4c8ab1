"""Prompts that are read ahead are those of the next steps, and the run's own cursor does not move."""

from contextlib import nullcontext
from types import SimpleNamespace

from hfdist.config.data import Packing
from hfdist.data import TokenStream
from hfdist.tune.generators.generators import Generators
from hfdist.tune.generators.host import Host, _Totals
from hfdist.tune.generators.lookahead import Lookahead
from hfdist.tune.generators.sockets import connect
from tests.unit.data.corpora import tokenizer
from tests.unit.data.streams import memory_config, memory_corpus

PER_STEP, RANK, SIZE = 2, 1, 2


def ids(row, mask):
    return row[: int(mask.sum())].tolist()


def read(batches):
    batch = next(batches)
    return [ids(*row) for row in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


def test_what_is_read_ahead_comes_next_and_once(tmp_path):
    config = memory_config(tmp_path, packing=Packing.none, sequence_length=4096, lanes=4)
    stream = TokenStream(memory_corpus(config), tokenizer(), config, data_rank=RANK, data_size=SIZE)
    ahead, batches, known = Lookahead(stream, data_rank=RANK, data_size=SIZE), iter(stream.loader(batch_size=2)), {}
    for step in range(8):
        given = read(batches)
        cursor = stream.state_dict()
        first = step * PER_STEP * SIZE + RANK
        numbers = [first, first + SIZE]
        assert [known.pop(number, tokens) for number, tokens in zip(numbers, given, strict=True)] == given
        if step == 5:
            # As after the run has gone back: all is read anew.
            ahead.restart()
            known.clear()
        for number, row in ahead.read(numbers[-1], numbers[-1] + 2 * PER_STEP * SIZE):
            assert number not in known
            known[number] = ids(row["input_ids"][0], row["attention_mask"][0])
        assert sorted(known) == [numbers[-1] + SIZE * (1 + place) for place in range(2 * PER_STEP)]
        assert stream.state_dict() == cursor


def test_a_run_that_goes_back_to_the_step_that_failed_asks_anew():
    generators, state = Generators.__new__(Generators), SimpleNamespace(global_step=0)
    generators._training = SimpleNamespace(state=state, waiting=lambda what: nullcontext())
    generators._topology = SimpleNamespace(world_size=1, data=1)
    generators._ahead = SimpleNamespace(restart=lambda: None)
    generators._rollback, generators._step, generators._published, generators._wait_seconds = 0, -1, -1, 0.0
    generators._publish = lambda step: None
    generators._exchange = lambda numbers, prompts, step, answers: generators._asked.update(numbers) or []
    generators._asked, generators._limits = set(), SimpleNamespace(end_ids=())
    asked = []
    for state.global_step, number in ((0, 0), (1, 1), (1, 1), (2, 2)):
        generators.answer([number], [[5]])
        asked.append((generators._rollback, sorted(generators._asked)))
    assert asked == [(0, [0]), (0, [0, 1]), (1, [1]), (1, [1, 2])]


def test_it_ends_where_the_data_end(tmp_path):
    config = memory_config(tmp_path, packing=Packing.none, lanes=1, epochs={"a": 1}, eval_fraction=0)
    stream = TokenStream(memory_corpus(config, a=["one", "two", "three"]), tokenizer(), config)
    read(iter(stream.loader(batch_size=1)))
    ahead = Lookahead(stream, data_rank=0, data_size=1)
    assert [number for number, _ in ahead.read(0, 9)] == [1, 2]
    assert list(ahead.read(0, 9)) == []


def test_figures_are_of_the_time_since_the_last_ones():
    host = Host.__new__(Host)
    host._read = _Totals(0.0, 0, 0)
    for num_tokens, thrown_away, more in ((90, 2, 2), (100, 5, 3)):
        host._broker = SimpleNamespace(num_tokens=num_tokens, num_thrown_away=thrown_away)
        figures = host.figures()
        assert figures["answers_thrown_away"] == more
        assert figures["generator_tokens_per_second"] > 0


def test_the_end_of_a_training_closes_the_link(tmp_path):
    generators, state = Generators.__new__(Generators), SimpleNamespace(global_step=1, max_steps=1)
    generators._host, generators._link = None, (link := connect(tmp_path, "rank-0"))
    generators.on_train_end(None, state, None)
    assert link.closed
    assert generators._link is None
