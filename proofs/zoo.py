"""Write the table of all types: `python -m proofs.zoo docs/zoo.md`. Takes seven minutes."""

import argparse
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from hfdist.config.strategy import ContextMethod
from hfdist.models.blocks import find_block_parts
from hfdist.strategies.self_check import GRADIENT_BOUND
from hfdist.strategies.tensor.plan import ALL_GATHERED, OWN, OWN_GATHERED
from hfdist.testing import run_ranks
from tests.zoo.hub_files import WRONG, how_saved
from tests.zoo.models import NOT_BUILDABLE, TYPES, tiny_model
from tests.zoo.packing import Packed, pack_type
from tests.zoo.sharding import (
    NUM_EXPERT_RANKS,
    NUM_TENSOR_RANKS,
    Sharded,
    expert_types,
    shard_types,
    share_types,
    tensor_types,
)
from tests.zoo.splitting import NEEDS_MORE_THAN_TEXT, TOLERANCE, Outcome, group_of_one, split_type

NUM_STAGES = (2, 3)
NUM_RANKS = 2
"""That shard."""

PLANS = {OWN: "own", OWN_GATHERED: "own, gathered", ALL_GATHERED: "gathered"} | {
    one.value: one.value for one in ContextMethod
}

HEADER = """\
# The zoo: every causal language model of transformers, split and sharded

Each type in the causal language model mapping of transformers {transformers} is built with a tiny random model of all
its kinds of blocks (float32, CPU, torch {torch}), split at its blocks into {stages} stages, and run for one step of two
micro batches under a pipeline schedule. The losses and all gradients are compared with those of the whole model.
*Exact*: no relative difference above {tolerance:g}. *Refused*: hfdist says before training that the model cannot be
split, and why. The splitter has no code for single models.

```
make zoo
```

Each is also sharded by FSDP2 over two ranks, of which each runs two micro batches, and is compared with the whole model
on all four: {sharded}.

And each is sharded over {tensor_ranks} tensor ranks and runs two micro batches, of which the first has no whole logits
where the model allows it: {tensor}. A type is refused if a small model of it cannot be tried, or if no plan is right.
*Own* is transformers' plan for the type, *own, gathered* the same with gathered outputs in attention, *gathered* has
gathered outputs in all layers ([what that means](layouts.md#how-tensor-ranks-share-a-model)).

In all these layouts, and those below, ranks add up in another order than the whole model, and the first micro batch has
its loss in chunks. So gradients may differ by {gradient_bound:g}.

And the sequences of each are shared by {ranks} context ranks, as two packed documents: {context}. Types are refused
whose tokens meet elsewhere than in an attention that transformers lets us replace: recurrent layers, convolutions, an
attention of the type's own. *ulysses* and *gather* are [how ranks share attention](layouts.md#long-sequences).

And each is saved, from whole tensors and from parts as ranks hold them, and compared with the bytes that
`save_pretrained` writes: {saved}. *Converted*: its files hold other tensors than the class, such as single experts
([more](checkpoints.md#tensors)).

And the stacked experts of each are packed in 4 bits, and two micro batches are compared with PEFT's LoRA of these
experts over the dequantized weights: {packed}. *Exact* ones take at most {most_bytes:.2f} bytes a weight, with
their scales. *Left*: its class computes them by itself, so they stay as they are
([more](fine-tuning.md#frozen-weights-in-4-bits)).

Over {expert_ranks} expert ranks, of which each runs two micro batches: {expert}. Types are refused that have no
experts, or none that transformers has a plan for.

`make zoo` writes this page, and runs the same as tests.

| outcome | types |
|---|---|
{counts}
| all | {all} |

Refused or not built:

{reasons}

{more} are tried on more than text (an image, codebooks), which hfdist's data sources do not give.

## All types

What travels is found by trying: what a stage has not received is NaN in it. *Loss* and *gradients* are the largest
relative differences, first at {stages} stages of a pipeline, then under FSDP2, over tensor, context and expert ranks,
and last of packed experts. Of gradients, relative to the largest element of the parameter's, but at least to a
thousandth of the model's largest.

{columns}
{rows}
"""


def main() -> int:
    """Returns 1 if a type comes out wrong."""
    parser = argparse.ArgumentParser(prog="python -m proofs.zoo", description=__doc__)
    parser.add_argument("path", type=Path, help="the page to write")
    path = parser.parse_args().path
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    sharded = run_ranks(shard_types, NUM_RANKS, TYPES, timeout_seconds=1800)
    tensor = run_ranks(tensor_types, NUM_TENSOR_RANKS, TYPES, timeout_seconds=1800)
    context = run_ranks(share_types, NUM_RANKS, TYPES, ContextMethod.auto, timeout_seconds=1800)
    expert = run_ranks(expert_types, NUM_EXPERT_RANKS, TYPES, timeout_seconds=1800)
    outcomes, saved, packed = {}, {}, {}
    with group_of_one(), tempfile.TemporaryDirectory() as folder:
        for model_type in TYPES:
            outcomes[model_type] = [split_type(model_type, num_stages) for num_stages in NUM_STAGES]
            saved[model_type] = how_saved(tiny_model(model_type), Path(folder) / model_type)
            packed[model_type] = pack_type(model_type)
            logging.info("%s: %s", model_type, ", ".join(outcome.verdict for outcome in outcomes[model_type]))
    path.write_text(page(outcomes, [sharded, tensor, context, expert], saved, packed), encoding="utf-8")
    tried = [*map(worst_of, outcomes.values()), *packed.values()]
    is_wrong = WRONG in saved.values() or any(one.verdict == "wrong" for one in tried)
    return int(
        is_wrong
        or any(one.verdict == "wrong" for of_rank in sharded + tensor + context + expert for one in of_rank.values())
    )


def page(
    outcomes: dict[str, list[Outcome]],
    layouts: list[list[dict[str, Sharded]]],
    saved: dict[str, str],
    packed: dict[str, Packed],
) -> str:
    """The whole page as Markdown. `layouts`: FSDP2, tensor, context and expert ranks."""
    sharded, tensor, context, expert = layouts
    worst = [worst_of(tried) for tried in outcomes.values()]
    counts = Counter(f"{outcome.verdict} with {outcome.travels}" for outcome in worst if outcome.travels)
    refused = {outcome.model_type: outcome.reason for outcome in worst if outcome.reason}
    rows = [*counts.most_common(), ("refused", len(refused)), ("not built", len(NOT_BUILDABLE))]
    return HEADER.format(
        transformers=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        stages=" and ".join(str(num_stages) for num_stages in NUM_STAGES),
        tolerance=TOLERANCE,
        counts="\n".join(f"| {name} | {count} |" for name, count in rows),
        all=len(outcomes) + len(NOT_BUILDABLE),
        reasons="\n".join(f"* `{name}`: {reason}" for name, reason in (refused | NOT_BUILDABLE).items()),
        more=", ".join(f"`{name}`" for name in NEEDS_MORE_THAN_TEXT),
        sharded=_verdicts(sharded),
        tensor=_verdicts(tensor),
        ranks=NUM_RANKS,
        tensor_ranks=NUM_TENSOR_RANKS,
        context=_verdicts(context),
        expert=_verdicts(expert),
        expert_ranks=NUM_EXPERT_RANKS,
        saved=", ".join(f"{count} {how}" for how, count in Counter(saved.values()).most_common()),
        packed=", ".join(f"{n} {how}" for how, n in Counter(p.verdict for p in packed.values()).most_common()),
        most_bytes=max(one.bytes_per_weight for one in packed.values()),
        gradient_bound=GRADIENT_BOUND,
        columns=_columns("fsdp2", "tensor", "context", "expert"),
        rows="\n".join(
            row(
                model_type,
                tried,
                *([of_rank[model_type] for of_rank in ranks] for ranks in layouts),
                saved=saved[model_type],
                packed=packed[model_type],
            )
            for model_type, tried in outcomes.items()
        ),
    )


def _columns(*layouts: str) -> str:
    names = ["type", "blocks", "outcome", "what travels", "loss", "gradients"]
    for layout in layouts:
        names += [layout, "loss", "gradients"]
    names += ["saved", "experts in 4 bits", "bytes a weight", "loss", "gradients"]
    return f"| {' | '.join(names)} |\n{'|---' * len(names)}|"


def _verdicts(ranks: list[dict[str, Sharded]]) -> str:
    verdicts = Counter(outcome.verdict for outcome in ranks[0].values())
    return ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())


def row(model_type: str, tried: list[Outcome], *layouts: list[Sharded], saved: str, packed: Packed) -> str:
    """Of the large table."""
    outcome = worst_of(tried)
    blocks = find_block_parts(tiny_model(model_type))
    classes = " and ".join(dict.fromkeys(f"`{type(part).__name__}`" for block in blocks for part in block))
    cells = [f"`{model_type}`", f"{len(blocks)} {classes}", outcome.verdict, outcome.travels]
    cells += _differences(tried)
    for of_rank in layouts:
        plan = PLANS.get(of_rank[0].plan, "")
        plan = f", {plan}" if plan else ""
        cells += [of_rank[0].verdict + plan, *_differences(of_rank)]
    cells += [saved, *_packed_cells(packed)]
    return f"| {' | '.join(cells)} |"


def _packed_cells(packed: Packed) -> list[str]:
    if not packed.bytes_per_weight:
        return [packed.verdict.replace("no experts", ""), "", "", ""]
    verdict = packed.verdict + (", others left" if packed.left else "")
    return [
        verdict,
        f"{packed.bytes_per_weight:.2f}",
        f"{packed.loss_difference:.1g}",
        f"{packed.gradient_difference:.1g}",
    ]


def _differences(tried: Sequence[Outcome | Sharded]) -> list[str]:
    columns = zip(*((one.loss_difference, one.gradient_difference) for one in tried), strict=True)
    return ["" if tried[0].reason else f"{max(differences):.1g}" for differences in columns]


def worst_of(tried: list[Outcome]) -> Outcome:
    """Wrong before refused before exact; then the one for which most travels."""
    rank = {"exact": 0, "refused": 1, "wrong": 2}
    return max(tried, key=lambda outcome: (rank[outcome.verdict], len(outcome.travels)))


if __name__ == "__main__":
    sys.exit(main())
