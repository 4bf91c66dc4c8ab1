"""Mistakes planted one at a time, each with the cheapest test that must see it. `python -m tests.mutations` runs them.

Each is put into a copy of the tree, and found there by its text, in whatever module that is. Some stand for a test that
would be slower: a mistake that is caught here is caught before a run of hours shows it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("hfdist", "recipes", "conf", "tests", "benchmarks", "docs", "pyproject.toml", "README.md")
MOST_SECONDS = 300
"""A mistake that makes ranks wait for each other is caught, too."""


@dataclass(frozen=True)
class Mutation:
    """A mistake."""

    name: str
    old: str
    """Occurs once in all of hfdist."""
    new: str
    test: str
    """Arguments of pytest."""


UNIT, DISTRIBUTED = "tests/unit", "tests/distributed"
MUTATIONS = [
    Mutation(
        "a micro batch is dropped",
        "for index in range(num_microbatches)]",
        "for index in range(num_microbatches - 1)]",
        f"{UNIT}/pipeline/test_microbatches.py",
    ),
    Mutation(
        "the loss is not scaled by the number of processes",
        "            loss *= self._num_averaged\n",
        "            loss *= 1\n",
        f"{DISTRIBUTED}/test_lean_step.py::test_two_ranks_give_the_same_bits",
    ),
    Mutation(
        "the gradient norm is of one rank",
        "    return torch.stack(every).sum()\n",
        "    return value\n",
        f"{UNIT}/test_gradients.py",
    ),
    Mutation(
        "the cursor is off by one",
        "Progress(sequence.next_place, num_sequences + 1,",
        "Progress(sequence.next_place, num_sequences + 2,",
        f"{UNIT}/data/test_stream.py",
    ),
    Mutation(
        "files are not synced",
        "    sync_tree(unfinished)\n    replaced = None\n",
        "    replaced = None\n",
        f"{DISTRIBUTED}/test_checkpoint_failures.py::test_all_is_on_the_disk_before_it_has_its_name",
    ),
    Mutation(
        "gradients of tied weights are not summed",
        "        for group, names in self._io.shared:\n",
        "        for group, names in ():\n",
        f"{DISTRIBUTED}/test_pipeline.py -k 1f1b",
    ),
    Mutation(
        "vectors decay, too",
        "if len(self.engine.whole_shape(p)) >= 2]",
        "if len(self.engine.whole_shape(p)) >= 1]",
        f"{DISTRIBUTED}/test_trainer.py -k weight_decay",
    ),
    Mutation(
        "each rank shuffles by a seed of its own",
        "        self.plan = _make_plan(",
        '        config = __import__("dataclasses").replace(config, seed=config.seed + data_rank)\n'
        "        self.plan = _make_plan(",
        f"{UNIT}/data/test_stream.py",
    ),
    Mutation(
        "a key of the optimizer's state is lost",
        "                tensors[key] = value\n",
        '                tensors |= {} if key == "exp_avg_sq" else {key: value}\n',
        f"{DISTRIBUTED}/test_checkpoint_zero.py::test_a_fused_optimizer_too",
    ),
    Mutation(
        "copies that fill up the last batch are targets",
        "            filler = torch.full_like(filler, _NEVER_FILLED[name])\n",
        "            pass\n",
        f"{UNIT}/pipeline/test_microbatches.py",
    ),
    Mutation(
        "the held-out loss is a mean of the ranks' means",
        "        dist.all_reduce(sums)\n",
        "        sums = sums / sums[:, 1:].clamp(min=1)\n        dist.all_reduce(sums)\n",
        f"{DISTRIBUTED}/test_trainer.py -k held_out_loss",
    ),
    Mutation(
        "hashes of the manifest are not compared",
        "part.begin, part.num_bytes) == part.xxh128\n",
        'part.begin, part.num_bytes) != ""\n',
        f"{UNIT}/checkpoint/test_folder.py",
    ),
    Mutation(
        "ranks of a pipeline may be given different batches",
        "    if not torch.equal(largest, -smallest):\n",
        "    if False:\n",
        f"{DISTRIBUTED}/test_pipeline_trainer.py::test_what_would_train_wrongly_is_refused",
    ),
    Mutation(
        "one rank alone skips a bad batch",
        "        self._is_finite = math.isfinite(norm) and norm >= 0\n",
        "        self._is_finite = math.isfinite(norm) or self._trainer.strategy.topology.data_rank == 0\n",
        f"{DISTRIBUTED}/test_numerics.py::test_what_does_not_pass_stops_the_run_and_names_the_documents",
    ),
    Mutation(
        "documents of a sequence see each other",
        "np.frombuffer(bytearray().join([places[:length] for length in lengths]), dtype)",
        "np.arange(sum(lengths), dtype=dtype)",
        f"{UNIT}/data/test_packing.py",
    ),
    Mutation(
        "the first token of a document is a target",
        "    labels[[0, *accumulate(lengths[:-1])]] = IGNORED\n",
        "    labels[0] = IGNORED\n",
        f"{UNIT}/data/test_packing.py",
    ),
    Mutation(
        "the learning rate is one step behind after a resume",
        "        scheduler.last_epoch = steps\n",
        "        scheduler.last_epoch = steps - 1\n",
        f"{DISTRIBUTED}/test_resume.py -k test_the_same_layout_goes_on",
    ),
    Mutation(
        "the ledger keeps a record more than the checkpoint counts",
        "kept * RECORD.itemsize)",
        "(kept + 1) * RECORD.itemsize)",
        f"{UNIT}/data/test_ledger.py {UNIT}/data/test_any_interruption.py",
    ),
    Mutation(
        "ranks write their random states to one file",
        "rng-{of_rank:05d}.safetensors",
        "rng-00000.safetensors",
        f"{DISTRIBUTED}/test_checkpoint_failures.py -k random_state",
    ),
    Mutation("a stopped run ends with another code", "exit_code = 75", "exit_code = 1", f"{UNIT}/test_errors.py"),
]


def plant(tree: Path, mutation: Mutation) -> Path | None:
    """Replace the text, and give the module; None: it is not there, or more than once."""
    holders = [path for path in (tree / "hfdist").rglob("*.py") if mutation.old in path.read_text(encoding="utf-8")]
    if len(holders) != 1:
        return None
    text = holders[0].read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        return None
    holders[0].write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    return holders[0]


def verdict(mutation: Mutation) -> str:
    """Run the test in a copy with the mistake: caught, MISSED, or STALE where its text is gone."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        for part in COPIED:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, tree / part)
        if plant(tree, mutation) is None:
            return "STALE"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *mutation.test.split()]
        environment = os.environ | {"PYTHONPATH": str(tree)}
        try:
            done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired:
            return "caught (hung)"
        # 1: tests failed; others say that none was run.
        return {0: "MISSED", 1: "caught"}.get(done.returncode, "STALE")


def main(words: list[str]) -> int:
    """Run all whose names hold one of the words, and print a table."""
    chosen = [mutation for mutation in MUTATIONS if not words or any(word in mutation.name for word in words)]
    sys.stdout.write("| mistake | | test | seconds |\n|---|---|---|---|\n")
    verdicts = []
    for mutation in chosen:
        begin = time.monotonic()
        verdicts.append(verdict(mutation))
        seconds = time.monotonic() - begin
        sys.stdout.write(f"| {mutation.name} | {verdicts[-1]} | `{mutation.test}` | {seconds:.0f} |\n")
        sys.stdout.flush()
    return int(any(not verdict.startswith("caught") for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
