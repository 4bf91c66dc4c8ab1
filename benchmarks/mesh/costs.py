"""What each axis of the mesh sends in a step, and what a rank holds, beside the formulas.

python -m benchmarks.mesh.costs --write
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.growth import training
from benchmarks.mesh.theory import Layout, Model, held_bytes, sent_bytes
from benchmarks.table import Measure, describe_run, markdown, publish, read_options
from hfdist.models.loss import LossHead
from hfdist.testing import run_ranks

MOST_OF_FORMULA = 1.02
_KIB = 1024
_LLAMA: dict[str, Any] = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}  # fmt: skip
_INDIVISIBLE = _LLAMA | {"hidden_size": 130, "intermediate_size": 351, "num_attention_heads": 5,
         "num_key_value_heads": 5}  # fmt: skip
_MIXTRAL = _LLAMA | {
    "model_type": "mixtral",
    "intermediate_size": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    keys: dict[str, Any]
    """Keys of `strategy.*`, with their values."""
    layout: Layout
    sizes: dict[str, Any] = field(default_factory=lambda: _LLAMA)

    @property
    def num_ranks(self) -> int:
        """All."""
        layout = self.layout
        return layout.replicate * layout.shard * layout.context * layout.tensor * layout.pipeline


_STEP = {"micro_batches": 2, "sequences": 2, "tokens": 64}
_FSDP = {"sharding": "fsdp2"}
_3D = _FSDP | {"pipeline": 2, "tensor": 2}
CASES = {
    "fsdp2": Case(keys=_FSDP, layout=Layout(**_STEP | {"micro_batches": 1}, shard=2, is_fsdp=True)),
    "tensor, own plan": Case(keys={"tensor": 2}, layout=Layout(**_STEP, tensor=2)),
    "tensor, tokens shared": Case(
        keys={"tensor": 2, "sequence": True}, layout=Layout(**_STEP, tensor=2, shares_tokens=True)
    ),
    "tensor, outputs gathered": Case(
        keys={"tensor": 2}, layout=Layout(**_STEP, tensor=2, gathers_outputs=True), sizes=_INDIVISIBLE
    ),
    "context, ulysses": Case(keys={"context": 2, "context_method": "ulysses"}, layout=Layout(**_STEP, context=2)),
    "context, gather": Case(
        keys={"context": 2, "context_method": "gather"}, layout=Layout(**_STEP, context=2, gathers_keys=True)
    ),
    "expert": Case(keys={"expert": 2}, layout=Layout(**_STEP, shard=2, expert=2), sizes=_MIXTRAL),
    "hsdp": Case(
        keys=_FSDP | {"replicate": 2, "reshard": False},
        layout=Layout(**_STEP | {"micro_batches": 1}, replicate=2, shard=2, is_fsdp=True, reshards=False),
    ),
    "3d": Case(keys=_3D, layout=Layout(**_STEP, shard=2, tensor=2, pipeline=2, is_fsdp=True)),
}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Averages over the ranks of a run, beside the formulas."""

    sent: Counter[tuple[str, str]]
    """Bytes by axis and kind of collective; `other` is what no formula has."""
    expected_sent: Counter[tuple[str, str]]
    socket_bytes: float
    """Bytes as the sockets count them. A reduce-scatter of gloo sends what an all-reduce does."""
    held: dict[str, float]
    expected_held: dict[str, float]

    @property
    def ratio(self) -> float:
        """All that a rank sends, over the formulas."""
        return self.sent.total() / self.expected_sent.total()

    @property
    def held_ratio(self) -> float:
        """All that a rank holds, over the formulas."""
        return sum(self.held.values()) / sum(self.expected_held.values())


def main() -> None:
    """Measure, print the tables, and write them down if asked to."""
    options = read_options("mesh.costs", __doc__)
    costs = measure(list(CASES))
    publish(options, "mesh.costs", "\n\n".join([_preamble(), _table_sent(costs), _table_held(costs)]), _measures(costs))


def measure(names: Sequence[str]) -> dict[str, Costs]:
    """Train each case for some steps; ranks are forked once for all cases of as many."""
    found: dict[str, Costs] = {}
    for num_ranks in dict.fromkeys(CASES[name].num_ranks for name in names):
        own = [name for name in names if CASES[name].num_ranks == num_ranks]
        ranks = run_ranks(_train, num_ranks, own, timeout_seconds=600)
        found |= {name: _average(CASES[name], [rank[name] for rank in ranks]) for name in own}
    return {name: found[name] for name in names}


def _train(names: Sequence[str]) -> dict[str, training.Costs]:
    return {name: training.train(_work(CASES[name])) for name in names}


def _work(case: Case) -> training.Work:
    layout = case.layout
    return training.Work(
        layout=case.keys,
        sizes=case.sizes,
        global_batch_size=layout.micro_batches * layout.sequences * layout.replicate * layout.shard,
        sequence_tokens=layout.tokens,
        num_steps=1,
        micro_batch_size=layout.sequences,
        loss_head=LossHead(),
    )


def _average(case: Case, ranks: Sequence[training.Costs]) -> Costs:
    model = Model.of(case.sizes)
    expected = sent_bytes(model, case.layout)
    sent: Counter[tuple[str, str]] = Counter()
    for rank in ranks:
        for key, num_bytes in rank.axis_bytes.items():
            sent[key if key in expected else ("other", "all")] += num_bytes
    count = len(ranks)
    held = {
        "weights": sum(rank.weight_bytes for rank in ranks),
        "gradients": sum(rank.gradient_bytes for rank in ranks),
        "optimizer": sum(rank.optimizer_bytes for rank in ranks),
    }
    return Costs(
        sent=Counter({key: num_bytes // count for key, num_bytes in sent.items()}),
        expected_sent=expected,
        socket_bytes=sum(rank.sent_bytes for rank in ranks) / count,
        held={kind: num_bytes / count for kind, num_bytes in held.items()},
        expected_held=held_bytes(model, case.layout),
    )


def _table_sent(costs: dict[str, Costs]) -> str:
    rows = []
    for name, of_case in costs.items():
        for axis, kind in sorted({*of_case.sent, *of_case.expected_sent}):
            sent, expected = of_case.sent[axis, kind], of_case.expected_sent[axis, kind]
            ratio = f"{sent / expected:.3f}" if expected else "-"
            rows.append([name, axis, kind, f"{sent / _KIB:.2f}", f"{expected / _KIB:.2f}", ratio])
        total = of_case.expected_sent.total() / _KIB
        sent_at_sockets = f"{of_case.socket_bytes / _KIB:.0f} at the sockets"
        rows.append([name, "all", sent_at_sockets, f"{of_case.sent.total() / _KIB:.2f}", f"{total:.2f}",
                     f"{of_case.ratio:.3f}"])  # fmt: skip
    return markdown(["layout", "axis", "what", "sent by a rank, KiB", "formula, KiB", "x formula"], rows)


def _table_held(costs: dict[str, Costs]) -> str:
    rows = [
        [name, kind, f"{held / _KIB:.1f}", f"{of_case.expected_held[kind] / _KIB:.1f}",
         f"{held / of_case.expected_held[kind]:.3f}"]
        for name, of_case in costs.items()
        for kind, held in of_case.held.items()
    ]  # fmt: skip
    return markdown(["layout", "what", "held by a rank, KiB", "formula, KiB", "x formula"], rows)


def _measures(costs: dict[str, Costs]) -> list[Measure]:
    goal = f"<= {MOST_OF_FORMULA:g} x formula"
    measures = [
        Measure(
            what=f"bytes that a rank sends in a step, {name}",
            unit="KiB",
            ours=of_case.sent.total() / _KIB,
            limits={"formula": of_case.expected_sent.total() / _KIB, "gloo's sockets": of_case.socket_bytes / _KIB},
            goal=goal,
            is_met=of_case.ratio <= MOST_OF_FORMULA,
        )
        for name, of_case in costs.items()
    ]
    name, most = max(costs.items(), key=lambda item: item[1].held_ratio)
    held, expected = sum(most.held.values()), sum(most.expected_held.values())
    what = f"weights, gradients and optimizer of a rank, {name}, which is most above its formula"
    measures.append(
        Measure(
            what=what,
            unit="KiB",
            ours=held / _KIB,
            limits={"formula": expected / _KIB},
            goal=goal,
            is_met=most.held_ratio <= MOST_OF_FORMULA,
        )
    )
    return measures


def _preamble() -> str:
    step = f"{_STEP['micro_batches']} micro batches of {_STEP['sequences']} sequences of {_STEP['tokens']} tokens"
    return (
        "## What each axis sends\n\n"
        f"One optimizer step of a Llama (for experts: a Mixtral) of {_LLAMA['num_hidden_layers']} blocks of width "
        f"{_LLAMA['hidden_size']} and a vocabulary of {_LLAMA['vocab_size']}, float32, AdamW, through "
        f"`hfdist.Trainer` with its loss in chunks; {step} for a data rank (fsdp2, hsdp: one). 2 ranks; hsdp: 2 "
        "replicas of 2 shards; 3d: 2 stages x 2 shards x 2 tensor ranks. Averages over the ranks, counted at the "
        "collectives as a ring would send; gloo's own reduce-scatter sends twice as much. `other`: what "
        "no formula has, such as the count of targets, norms and checks. The formulas stand in "
        "`benchmarks/mesh/theory.py`.\n\n"
        f"{describe_run('benchmarks.mesh.costs', 'torch', 'transformers')}"
    )


if __name__ == "__main__":
    main()
