"""Mistakes planted one at a time, each with the cheapest test that must see it. `python -m proofs.mutations` runs them.

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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("hfdist", "recipes", "conf", "tests", "proofs", "benchmarks", "docs", "pyproject.toml", "README.md")
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
        "return loss if times == 1 else loss * times",
        "return loss",
        f"{DISTRIBUTED}/test_losses.py::test_weighs_as_if_all_were_one_batch",
    ),
    Mutation(
        "the gradient norm is of one rank",
        "    return torch.stack(every).sum()\n",
        "    return value\n",
        f"{UNIT}/test_gradients.py",
    ),
    Mutation(
        "the cursor is off by one",
        "            before.sequences + 1,\n",
        "            before.sequences + 2,\n",
        f"{UNIT}/data/test_stream.py",
    ),
    Mutation(
        "files are not synced",
        "    sync_tree(unfinished, synced)\n",
        "",
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
        "in model.named_parameters() if parameter.ndim >= 2]",
        "in model.named_parameters() if parameter.ndim >= 1]",
        f"{DISTRIBUTED}/test_trainer.py -k weight_decay",
    ),
    Mutation(
        "each rank shuffles by a seed of its own",
        "            make_plan(corpus, tokenizer, config, global_batch_size),\n",
        "            make_plan(corpus, tokenizer, replace(config, seed=config.seed + data_rank), global_batch_size),\n",
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
        "        filler = torch.full_like(filler, _NEVER_FILLED[name])\n",
        "        pass\n",
        f"{UNIT}/pipeline/test_microbatches.py",
    ),
    Mutation(
        "the held-out loss is a mean of the ranks' means",
        "            dist.all_reduce(sums)\n        return sums if is_labelled else None\n",
        "            sums = sums / sums[:, 1:].clamp(min=1)\n            dist.all_reduce(sums)\n"
        "        return sums if is_labelled else None\n",
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
        "    if largest != -negated_smallest:\n",
        "    if False:\n",
        f"{DISTRIBUTED}/test_pipeline_trainer.py::test_what_would_train_wrongly_is_refused",
    ),
    Mutation(
        "one rank alone skips a bad batch",
        "        self._is_finite = math.isfinite(norm) and norm >= 0\n",
        "        self._is_finite = math.isfinite(norm) or self._training.strategy.topology.data_rank == 0\n",
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
        "    labels[begins] = IGNORED\n",
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
        "{RANDOM_STEM}{of_rank:05d}.safetensors",
        "{RANDOM_STEM}00000.safetensors",
        f"{DISTRIBUTED}/test_checkpoint_failures.py -k random_state",
    ),
    Mutation("a stopped run ends with another code", "exit_code = 75", "exit_code = 1", f"{UNIT}/test_errors.py"),
    Mutation(
        "each rank divides by its own number of targets",
        "self.accelerator.gather(num_items).sum() // self.strategy.topology.model",
        "num_items * self.args.world_size // self.strategy.topology.model",
        f"{DISTRIBUTED}/test_trainer.py::test_the_loss_is_the_mean_over_all_target_tokens",
    ),
    Mutation(
        "a pipeline loses the positions of packed documents",
        "values[index] for name, values in parts.items()}",
        'values[index] for name, values in parts.items() if name != "position_ids"}',
        f"{UNIT}/pipeline/test_microbatches.py",
    ),
    Mutation(
        "positions of each context rank begin at 0",
        """for name, tensor in whole.items()}
        # With a mask of its own""",
        """for name, tensor in whole.items()}
        shared["position_ids"] = shared["position_ids"] - shared["position_ids"][:, :1]
        # With a mask of its own""",
        f"{DISTRIBUTED}/test_context.py::test_rows_of_any_length_and_padding[layout0-left-True]",
    ),
    Mutation(
        "weights stay in the bfloat16 of their file",
        "        with trained.kept_in_float32(model):\n            nn.Module.to(model, dtype)\n",
        "        pass\n",
        f"{UNIT}/test_models.py -k from_the_folder_in_float32",
    ),
    Mutation(
        "a loss is divided by the exponentials of one rank's part of the vocabulary",
        "    dist.all_reduce(sums, group=shard.group)\n    exponentials",
        "    dist.all_reduce(sums[1:], group=shard.group)\n    exponentials",
        f"{DISTRIBUTED}/test_shared_vocabulary.py::test_the_loss_and_all_gradients_are_those_of_one_process",
    ),
    Mutation(
        "stages free the weights that no batch uses",
        "for name in _share_unused(split, unneeded, group):",
        "for name in _share_unused(split, unneeded, group)[:0]:",
        f"{DISTRIBUTED}/test_unused_weights.py::test_stages_hold_what_no_stage_needs",
    ),
    Mutation(
        "weights are saved under transformers' names, and not the Hub's",
        "names.blocks.get(piece.name) if names is not None and piece.key in NAMED_AS_WEIGHTS else None",
        "None",
        f"{UNIT}/checkpoint/test_hub_pieces.py",
    ),
    Mutation(
        "a checkpoint without one of its files takes the place of a whole one",
        "        check_files(path, read_manifest(path), ())\n",
        "        read_manifest(path)\n",
        f"{UNIT}/checkpoint/test_folder.py -k takes_the_place_of_nothing",
    ),
    Mutation(
        "a save in the background writes what later steps have left",
        "contents = replace(contents, elements=self._copy.take(contents.elements))",
        "self._copy.take(contents.elements)",
        f"{UNIT}/checkpoint/test_async_saver.py",
    ),
    Mutation(
        "proofs of the secret are not compared",
        "return hmac.compare_digest(found.encode(), prove(secret, side, *numbers).encode())",
        "return len(found) == len(prove(secret, side, *numbers))",
        f"{UNIT}/islands/test_strangers.py -k another_secret",
    ),
    Mutation(
        "a checkpoint lacks the outer momentum of islands",
        "            if self._has_momentum:\n                yield",
        "            if self._has_square:\n                yield",
        f"{UNIT}/islands/test_outer.py",
    ),
    Mutation(
        "a line of sweep.jsonl may set any key",
        "wrong = [*too_many, *missing, *bad_values]",
        "wrong = [*missing, *bad_values]",
        f"{UNIT}/sweep/test_space.py",
    ),
    Mutation(
        "a process imports modules of the working folder",
        '[sys.executable, "-P", *arguments]',
        "[sys.executable, *arguments]",
        f"{UNIT}/test_child_python.py",
    ),
    Mutation(
        "a class's own loss is passed by",
        "partial(super().compute_loss, model, **keywords)",
        "partial(transformers.Trainer.compute_loss, self, model, **keywords)",
        f"{DISTRIBUTED}/test_step_bits.py::test_one_process_gives_the_same_bits",
    ),
    Mutation(
        "rows that fill up the last global batch of an iterable count",
        "or [CountedRow(any_row, False)])",
        "or [CountedRow(any_row, True)])",
        f"{UNIT}/test_step.py -k iterable",
    ),
    Mutation(
        "held-out documents are trained, too",
        "is_elsewhere = self.corpus.are_held_out(columns.digests) != self._wants_held_out",
        "is_elsewhere = ~self.corpus.are_held_out(columns.digests) & self._wants_held_out",
        f"{UNIT}/data/test_masked_stream.py -k one_side_of_the_split",
    ),
    Mutation(
        "answers of pairs are not compared with the reference",
        "scores = log_probabilities - reference\n",
        "scores = log_probabilities - 0 * reference\n",
        f"{DISTRIBUTED}/test_preferences.py -k follows",
    ),
    Mutation(
        "an answer is compared with those to other prompts",
        "rewards - _sum(rewards, is_given) / _count(is_given), 0)",
        "rewards - rewards.mean(), 0)",
        f"{UNIT}/test_policy_loss.py",
    ),
    Mutation(
        "the last token of a prompt is learned",
        "            tokens[: len(first)] = ~tokens[: len(first)]\n",
        "            tokens[: len(first) - 1] = ~tokens[: len(first) - 1]\n",
        f"{UNIT}/data/test_chat.py -k the_prompt_has_the_tokens",
    ),
    Mutation(
        "a saved adapter has another scaling",
        "    config.inference_mode = True\n    for field",
        '    config.inference_mode = True\n    config.lora_alpha = getattr(config, "r", 1)\n    for field',
        f"{UNIT}/test_adapter.py -k opens_in_peft",
    ),
]


def read_modules(tree: Path) -> dict[Path, str]:
    """Give the text of each module of hfdist."""
    return {path: path.read_text(encoding="utf-8") for path in (tree / "hfdist").rglob("*.py")}


def planted(modules: Mapping[Path, str], mutation: Mutation) -> tuple[Path, str] | None:
    """Give the module with the mistake, and its text then; None: the text is not there, or more than once."""
    holders = [(path, text) for path, text in modules.items() if mutation.old in text]
    if sum(text.count(mutation.old) for _, text in holders) != 1:
        return None
    [(path, text)] = holders
    return path, text.replace(mutation.old, mutation.new)


def verdict(mutation: Mutation) -> str:
    """Run the test in a copy with the mistake: caught, MISSED, or STALE where its text is gone."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        for part in COPIED:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, tree / part)
        changed = planted(read_modules(tree), mutation)
        if changed is None:
            return "STALE"
        changed[0].write_text(changed[1], encoding="utf-8")
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
