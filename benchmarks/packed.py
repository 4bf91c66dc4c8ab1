"""Training on packed documents: attention document by document, beside a mask of tokens x tokens.

python -m benchmarks.packed --write
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.rounds import interleave, medians
from benchmarks.table import Measure, describe_run, markdown, publish, read_options
from hfdist.models.document_attention import BY_DOCUMENTS

NUM_TOKENS, QUICK_TOKENS = 8192, 512
SHAPES = {
    "256 wide, 4 blocks": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
                           "num_attention_heads": 4, "num_key_value_heads": 2},
    "576 wide, 2 blocks": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 2,
                           "num_attention_heads": 9, "num_key_value_heads": 3},
}  # fmt: skip
MASKED, ONE_DOCUMENT = "sdpa, a mask", "sdpa, one document"
OURS = "varlen"
GOAL, BOUND = 0.3, 1e-5


class Packed(NamedTuple):
    """A sequence."""

    ids: torch.Tensor
    """[1, tokens]."""
    positions: torch.Tensor
    """They restart at each document; [1, tokens]."""
    lengths: list[int]


def main() -> None:
    """Time a forward and a backward of each."""
    options = read_options("packed", __doc__, rounds=3)
    # Of one thread the CPU time is what is computed.
    torch.set_num_threads(1)
    packed = _web_like(QUICK_TOKENS if options.quick else NUM_TOKENS)
    rows, measures = [], []
    for shape, sizes in SHAPES.items():
        seconds, mask_bytes = _measure(packed, sizes, options.rounds)
        rows += [
            [shape, name, f"{spent:.2f}", f"{spent / seconds[MASKED]:.2f}", f"{mask_bytes[name]:,}"]
            for name, spent in seconds.items()
        ]
        measures.append(
            Measure(
                what=f"CPU time of a step on packed documents of {packed.ids.shape[1]:,} tokens, {shape}",
                unit="s",
                ours=seconds[OURS],
                peers={MASKED: seconds[MASKED]},
                limits={ONE_DOCUMENT: seconds[ONE_DOCUMENT]},
                goal=f"<= {GOAL:g}x {MASKED}",
                is_met=seconds[OURS] <= GOAL * seconds[MASKED],
            )
        )
        measures.append(
            Measure(
                what=f"what a block is given in place of a mask, {shape}",
                unit="bytes",
                ours=mask_bytes[OURS],
                peers={MASKED: mask_bytes[MASKED]},
                goal="no mask",
                is_met=mask_bytes[OURS] < packed.ids.shape[1],
            )
        )
    publish(options, "packed", _section(packed, rows, options.rounds), measures)


def _web_like(num_tokens: int) -> Packed:
    """Lengths as of `benchmarks.packing`; the last document is cut."""
    random, lengths = np.random.default_rng(0), []
    while sum(lengths) < num_tokens:
        lengths.append(min(max(round(random.lognormal(6.05, 1.0)), 8), num_tokens - sum(lengths)))
    ids = torch.randint(256, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    return Packed(ids, torch.cat([torch.arange(length) for length in lengths])[None], lengths)


def _measure(packed: Packed, sizes: Mapping[str, Any], num_rounds: int) -> tuple[dict[str, float], dict[str, int]]:
    """CPU seconds of a forward and a backward, and bytes of masks, by contender."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=NUM_TOKENS, use_cache=False, **sizes))
    losses: dict[str, float] = {}
    mask_bytes: dict[str, int] = {}

    def contender(name: str, attention: str, positions: torch.Tensor) -> Callable[[], float]:
        def see(_: object, __: object, named: dict[str, Any]) -> None:
            mask = named["attention_mask"]
            mask_bytes[name] = 0 if mask is None else mask.untyped_storage().nbytes()

        def run() -> float:
            model.set_attn_implementation(attention)
            model.zero_grad()
            handle = model.model.layers[0].register_forward_pre_hook(see, with_kwargs=True)
            begin = time.process_time()
            loss = model(input_ids=packed.ids, labels=packed.ids, position_ids=positions).loss
            loss.backward()
            spent = time.process_time() - begin
            handle.remove()
            losses[name] = float(loss.detach())
            return spent

        return run

    one = torch.arange(packed.ids.shape[1])[None]
    seconds = interleave(
        {
            OURS: contender(OURS, BY_DOCUMENTS["sdpa"], packed.positions),
            MASKED: contender(MASKED, "sdpa", packed.positions),
            ONE_DOCUMENT: contender(ONE_DOCUMENT, "sdpa", one),
        },
        num_rounds,
    )
    if not abs(losses[OURS] / losses[MASKED] - 1) <= BOUND:
        raise RuntimeError(f"the losses differ: {losses}")
    return medians(seconds), mask_bytes


def _section(packed: Packed, rows: list[list[str]], num_rounds: int) -> str:
    header = ["model", "attention", "CPU s", "x the mask", "bytes of the mask"]
    return (
        "## Packed documents\n\n"
        "Forward and backward of a Llama with a small vocabulary, float32, one thread, on a sequence of "
        f"{packed.ids.shape[1]:,} tokens: {len(packed.lengths)} documents with lengths as of web pages, the longest "
        f"of {max(packed.lengths):,}. The losses are equal to {BOUND:g}. `model.attention=auto` is `varlen` here: "
        "blocks are given the borders of documents. *One document*: the same tokens as one, without a mask. Bytes: of "
        f"what a block is given; `sdpa` makes numbers of four bytes of each. Medians of {num_rounds} interleaved "
        "rounds after one to warm up.\n\n"
        f"{describe_run('benchmarks.packed', 'transformers')}\n\n"
        f"{markdown(header, rows)}"
    )


if __name__ == "__main__":
    main()
