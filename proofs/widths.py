"""The best rates of three widths, with and without `optimizer.base_width`: `python -m proofs.widths PAGE`.

Each run is a whole pretraining of a small Llama on the standard library's source, from its config to its held-out loss.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.table import markdown, write_section
from tests.distributed.runs import eval_losses, pretrain
from tests.imports import import_all

WIDTHS = (64, 128, 256)
BASE_WIDTH = WIDTHS[0]
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
SEEDS = (0, 1)
RUN = ("model=tiny", "model.tokenizer.vocab_size=260", "model.tokenizer.train_bytes=100000",
       "data.sequence_length=128", "data.eval_sequences=128", "train.global_batch_size=8", "train.micro_batch_size=8",
       "model.config.tie_word_embeddings=false", "train.max_steps=250", "optimizer.warmup_steps=20")  # fmt: skip


def train(folder: Path, width: int, rate: float, seed: int, *, transfers: bool) -> float:
    """Train once, and give the last held-out loss."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": width // 16,
             "num_key_value_heads": width // 16}  # fmt: skip
    own = [f"model.config.{name}={value}" for name, value in sizes.items()]
    own += [f"optimizer.lr={rate}", f"train.seed={seed}"]
    own += [f"optimizer.base_width={BASE_WIDTH}"] if transfers else []
    run_dir = folder / f"{width}-{rate}-{seed}-{transfers}"
    return eval_losses(pretrain(run_dir, 1, *RUN, *own, timeout_seconds=600))[-1]


def write_widths(folder: Path) -> str:
    """A row for each width and way: the mean over seeds, and half the distance between the lowest and the highest."""
    rows = []
    for width in WIDTHS:
        for transfers in (False, True) if width != BASE_WIDTH else (False,):
            losses = [[train(folder, width, rate, seed, transfers=transfers) for seed in SEEDS] for rate in RATES]
            means = [statistics.mean(own) for own in losses]
            cells = [f"{mean:.3f} ± {(max(own) - min(own)) / 2:.3f}" for mean, own in zip(means, losses, strict=True)]
            best = means.index(min(means))
            cells[best] = f"**{cells[best]}**"
            rows.append([f"{width}", f"{BASE_WIDTH}" if transfers else "null", *cells])
            sys.stderr.write(f"{rows[-1]}\n")
    return markdown(["width", "`base_width`", *(f"{rate:g}" for rate in RATES)], rows)


def main(page: Path) -> None:
    """Write the table."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    import_all()
    with tempfile.TemporaryDirectory() as folder:
        write_section(page, "widths", write_widths(Path(folder)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
