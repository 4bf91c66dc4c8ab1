"""131,072 tokens in one sequence, shared by four ranks: peak memory of a rank beside that of one process.

python -m benchmarks.mesh.memory --write
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import hfdist
from benchmarks.table import Measure, add_options, describe_run, markdown, publish
from hfdist.testing import run_ranks

NUM_RANKS = 4
NUM_TOKENS, QUICK_TOKENS = 131_072, 8192
MOST_OF_ALONE = 0.3
LOSS_BOUND = 1e-5
MIB = 2**20
SIZES: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip


class Step(NamedTuple):
    """One optimizer step on one sequence."""

    peak_bytes: int
    """Bytes of the rank that took most, above what it held before the step."""
    loss: float
    gradient_norm: float


def main() -> None:
    """Measure, print the table, and write it down if asked to."""
    options = _options()
    steps = {num_ranks: _measure(num_ranks, options.tokens) for num_ranks in (1, NUM_RANKS)}
    alone, shared = steps[1], steps[NUM_RANKS]
    difference = max(abs(ours / reference - 1) for ours, reference in zip(shared[1:], alone[1:], strict=True))
    if difference > LOSS_BOUND:
        raise AssertionError(f"loss or gradient norm of {NUM_RANKS} ranks differ by {difference:.1e} of one process's")
    rows = [
        [str(number), f"{step.peak_bytes / MIB:.0f}", f"{step.peak_bytes / alone.peak_bytes:.3f}", f"{step.loss:.6f}",
         f"{step.gradient_norm:.6f}"]
        for number, step in steps.items()
    ]  # fmt: skip
    header = ["processes", "peak of a rank, MiB", "x one process", "loss", "gradient norm"]
    measure = Measure(
        what=f"peak memory of a step, a rank of {NUM_RANKS}, {options.tokens:,} tokens",
        unit="MiB",
        ours=shared.peak_bytes / MIB,
        limits={"one process": alone.peak_bytes / MIB},
        goal=f"<= {MOST_OF_ALONE:g} x one process",
        is_met=shared.peak_bytes <= MOST_OF_ALONE * alone.peak_bytes,
    )
    publish(options, "mesh.memory", "\n\n".join([_preamble(options), markdown(header, rows)]), [measure])


def _measure(num_ranks: int, num_tokens: int) -> Step:
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[Step] = run_ranks(_train, num_ranks, folder, num_tokens, timeout_seconds=3600)
    return ranks[0]._replace(peak_bytes=max(step.peak_bytes for step in ranks))


def _train(folder: str, num_tokens: int) -> Step:
    context = torch.distributed.get_world_size()
    strategy = hfdist.make_strategy(global_batch_size=1, sequence_length=num_tokens, context=context)
    fields: dict[str, Any] = strategy.training_arguments()
    arguments = TrainingArguments(
        folder, max_steps=1, logging_steps=1, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True,
        **fields,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=num_tokens))
    tokens = torch.randint(SIZES["vocab_size"], (num_tokens,))
    dataset = [{"input_ids": tokens, "labels": tokens}]
    trainer = hfdist.Trainer(model, arguments, strategy=strategy, train_dataset=dataset)
    # From here on the peak is counted anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_bytes("VmRSS")
    trainer.train()
    logged = trainer.state.log_history[0]
    return Step(_resident_bytes("VmHWM") - before, float(logged["loss"]), float(logged["grad_norm"]))


def _resident_bytes(key: str) -> int:
    [kibibytes] = re.findall(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kibibytes) * 1024


def _preamble(options: argparse.Namespace) -> str:
    return (
        "## One long sequence on four ranks\n\n"
        f"One step on one sequence of {options.tokens:,} tokens through `hfdist.Trainer`: 2 blocks of width 64,"
        f" float32, `strategy.context={NUM_RANKS}` (ulysses). Peak: resident memory above that before the step, of the "
        "rank with most. Loss and gradient norm must agree with those of one process.\n\n"
        f"{describe_run('benchmarks.mesh.memory', 'torch', 'transformers')}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mesh.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="of the sequence")
    options = add_options(parser).parse_args()
    if options.quick:
        options.tokens = QUICK_TOKENS
    return options


if __name__ == "__main__":
    main()
