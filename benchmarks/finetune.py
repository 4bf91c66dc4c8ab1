"""Fine-tuning one model on the same examples with hfdist and with TRL: losses, tokens a second, and peak memory.

All weights, a LoRA adapter, or one beside weights of 4 bits: `python -m benchmarks.finetune --write`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.rounds import interleave
from benchmarks.table import Measure, describe_run, markdown, publish, read_options

TRL, OURS, MIXED = "trl.SFTTrainer", "hfdist.Trainer", "SFTTrainer with hfdist's mixin"
RECOMPUTES = "hfdist.Trainer, recompute=cheap"
LARGEST_DIFFERENCE = 1e-4
ALL, LORA, QLORA = "all weights", "LoRA", "QLoRA"
_RANK, _SCALE = 16, 32


class Run(NamedTuple):
    """What one process has measured, from its second step to its last."""

    losses: list[float]
    tokens_per_second: float
    tokens_per_cpu_second: float
    peak_mib: float


def main() -> None:
    """Run all contenders in turn, each in a process of its own, and print or write the table."""
    options = _options()
    if options.child is not None:
        sys.stdout.write(json.dumps(_train(options)._asdict()) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder) / "model", options)
        measured = {}
        for trained in options.trained:
            names = (TRL, OURS) if options.quick else (TRL, OURS, MIXED if trained == ALL else RECOMPUTES)
            contenders = {name: partial(_in_process, folder, name, trained) for name in names}
            measured[trained] = interleave(contenders, options.rounds, num_warm_up=0)
    publish(options, "finetune", _section(options, measured), _measures(measured))


def _in_process(folder: str, name: str, trained: str) -> Run:
    command = [sys.executable, "-m", "benchmarks.finetune", *sys.argv[1:], "--child", name, "--folder", folder]
    command += ["--trained", trained]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{name} has failed:\n{done.stderr[-4000:]}")
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def _write_model(folder: Path, options: argparse.Namespace) -> None:
    """The model, converted once for all runs that have the same cache."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hfdist.config.data import DataConfig, cache_dir
    from hfdist.models.gguf import convert_gguf
    from tests.smollm2 import find_smollm2

    converted = convert_gguf(find_smollm2(), cache_dir(DataConfig()), key="model.name")
    if options.blocks is None:
        folder.symlink_to(converted)
        return
    cut = AutoModelForCausalLM.from_pretrained(converted, num_hidden_layers=options.blocks, dtype="float32")
    cut.save_pretrained(folder)
    AutoTokenizer.from_pretrained(converted).save_pretrained(folder)


def _train(options: argparse.Namespace) -> Run:
    from transformers import AutoTokenizer

    from hfdist.config.train import Recompute
    from hfdist.models.recompute import checkpoint_blocks

    folder = Path(options.folder)
    (trained,) = options.trained
    model = _model(str(folder / "model"), trained, is_ours=options.child in (OURS, RECOMPUTES))
    if options.child == RECOMPUTES:
        checkpoint_blocks(model, Recompute.cheap)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    clock = _make_clock()
    make: dict[str, Callable[..., Any]] = {TRL: _make_trl, OURS: _make_ours, RECOMPUTES: _make_ours, MIXED: _make_mixed}
    trainer = make[options.child](options, model, tokenizer, _examples(tokenizer, options))
    trainer.add_callback(clock)
    # What loading has held besides is not of the training.
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    trainer.train()
    wall, cpu = (end - begin for begin, end in zip(clock.times[0], clock.times[-1], strict=True))
    num_tokens = sum(len(row["input_ids"]) for row in list(trainer.train_dataset)[options.batch_size :])
    return Run(
        losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        tokens_per_second=num_tokens / wall,
        tokens_per_cpu_second=num_tokens / cpu,
        peak_mib=int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1024,
    )


def _model(folder: str, trained: str, *, is_ours: bool) -> Any:
    """The model as each library would have it: the same weights, and the same first weights of an adapter."""
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    load = partial(AutoModelForCausalLM.from_pretrained, folder, dtype="float32")
    if trained == ALL:
        return load()
    lora = LoraConfig(r=_RANK, lora_alpha=_SCALE, target_modules="all-linear", task_type="CAUSAL_LM")
    if is_ours:
        from hfdist.config.model import Quantization
        from hfdist.models.adapter import NAME, inject_adapter
        from hfdist.models.quantize import quantize_frozen

        model = load()
        torch.manual_seed(0)
        inject_adapter(model, lora, NAME)
        if trained == QLORA:
            quantize_frozen(model, Quantization.nf4)
        return model
    if trained == LORA:
        model = load()
    else:
        four_bits = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
        model = load(quantization_config=four_bits, device_map="cpu")
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(0)
    return get_peft_model(model, lora)


def _make_clock() -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Wall and CPU seconds at the end of each step."""

        def __init__(self) -> None:
            self.times: list[tuple[float, float]] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append((time.perf_counter(), time.process_time()))

    return Clock()


def _examples(tokenizer: Any, options: argparse.Namespace) -> Any:
    """Conversations made of the standard library's docstrings, as tokens; targets: what the assistant says."""
    from datasets import Dataset

    from hfdist.config.data import ChatConfig, DataConfig, RowFormat, SourceConfig, SourceKind
    from hfdist.data import open_corpus
    from hfdist.data.tokenization.encoders import Encoders

    source = SourceConfig(kind=SourceKind.docstrings)
    ((_, shard),) = open_corpus(DataConfig(sources={"docstrings": source}, format=RowFormat.auto)).shards
    num_examples = options.steps * options.batch_size
    numbers = range(0, sum(shard.runs), sum(shard.runs) // num_examples)[:num_examples]
    rows = []
    for tokens in Encoders(tokenizer, ChatConfig()).encode(shard, numbers, shard.read(numbers)):
        cut = tokens[: options.length].tolist()
        ids = [token if token >= 0 else ~token for token in cut]
        rows.append({"input_ids": ids, "labels": [token if token >= 0 else -100 for token in cut]})
    return Dataset.from_list(rows)


def _fields(options: argparse.Namespace) -> dict[str, Any]:
    """What all must have in common to become the same; TRL's defaults differ in several."""
    return {
        "output_dir": str(Path(options.folder) / "out"),
        "max_steps": options.steps,
        "learning_rate": 2e-5,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 1.0,
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _strategy(options: argparse.Namespace) -> Any:
    import hfdist

    sizes = {"global_batch_size": options.batch_size, "micro_batch_size": options.batch_size}
    return hfdist.make_strategy(**sizes, sequence_length=options.length)


def _make_ours(options: argparse.Namespace, model: Any, tokenizer: Any, examples: Any) -> Any:
    from transformers import DataCollatorForSeq2Seq, TrainingArguments

    import hfdist
    from hfdist.models.loss import LossHead
    from hfdist.trainer.run_options import RunOptions

    strategy = _strategy(options)
    return hfdist.Trainer(
        model,
        TrainingArguments(**_fields(options) | strategy.training_arguments()),
        strategy=strategy,
        # As in recipes, by `model.loss=auto`.
        options=RunOptions(loss_head=LossHead()),
        train_dataset=examples,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )


def _make_trl(options: argparse.Namespace, model: Any, tokenizer: Any, examples: Any) -> Any:
    import trl

    arguments = trl.SFTConfig(**_fields(options), per_device_train_batch_size=options.batch_size, max_length=None)
    return trl.SFTTrainer(model, args=arguments, train_dataset=examples, processing_class=tokenizer)


def _make_mixed(options: argparse.Namespace, model: Any, tokenizer: Any, examples: Any) -> Any:
    import trl

    import hfdist

    strategy = _strategy(options)
    mixed = type("Mixed", (hfdist.DistributedTrainerMixin, trl.SFTTrainer), {})
    arguments = trl.SFTConfig(**_fields(options) | strategy.training_arguments(), max_length=None)
    return mixed(model, args=arguments, strategy=strategy, train_dataset=examples, processing_class=tokenizer)


def _measures(measured: dict[str, dict[str, list[Run]]]) -> list[Measure]:
    """Speed by CPU time, and memory, beside TRL's."""
    figures: dict[str, tuple[str, Callable[[Run], float]]] = {
        "tokens per CPU second": ("tok/s", lambda run: run.tokens_per_cpu_second),
        "peak resident memory": ("MiB", lambda run: run.peak_mib),
    }
    medians = {
        (trained, name, what): statistics.median(map(figure, runs))
        for trained, of_name in measured.items()
        for name, runs in of_name.items()
        for what, (_, figure) in figures.items()
    }
    return [
        Measure(what=f"{what}, {name}, {trained}", unit=unit, ours=ours, peers={TRL: medians[trained, TRL, what]})
        for (trained, name, what), ours in medians.items()
        if name != TRL
        for unit in [figures[what][0]]
    ]


def _rows(trained: str, measured: dict[str, list[Run]]) -> list[list[str]]:
    """Medians of each trainer, and beside TRL's; ends where a loss differs."""
    medians = {
        name: [statistics.median(getattr(run, field) for run in runs) for field in Run._fields[1:]]
        for name, runs in measured.items()
    }
    reference = measured[TRL][0].losses
    rows = []
    for name, values in medians.items():
        largest = max(
            abs(own - theirs) / theirs
            for run in measured[name]
            for own, theirs in zip(run.losses, reference, strict=True)
        )
        if largest > LARGEST_DIFFERENCE:
            sys.exit(f"{name} has other losses than {TRL}: by {largest:.1e}, {measured[name][0].losses}, {reference}")
        cells = [
            text for value, theirs in zip(values, medians[TRL], strict=True)
            for text in (f"{value:.0f}", f"{value / theirs:.2f}")
        ]  # fmt: skip
        rows.append([trained, name, *cells, f"{reference[0]:.4f} to {reference[-1]:.4f}", f"{largest:.0e}"])
    return rows


def _section(options: argparse.Namespace, measured: dict[str, dict[str, list[Run]]]) -> str:
    header = ["trained", "trainer", "tokens/s", "x TRL", "tokens/CPU s", "x TRL", "peak MiB", "x TRL", "losses"]
    rows = [row for trained, of_name in measured.items() for row in _rows(trained, of_name)]
    model = "SmolLM2-135M-Instruct" + (f" cut to {options.blocks} blocks" if options.blocks else "")
    return (
        "## Fine-tuning beside TRL\n\n"
        f"{model} in float32, one process, {options.steps} steps of {options.batch_size} conversations made of the "
        f"standard library's docstrings, cut at {options.length} tokens, loss on the answers alone. All train the same "
        "tokens and labels in the same order (`train_sampling_strategy=sequential`), with no packing, the same linear "
        "schedule and AdamW, losses weighted by target tokens (as all do by default), and of TRL's defaults `bf16` and "
        "`gradient_checkpointing` are off. `hfdist.Trainer` computes its loss as recipes do. Adapters have rank "
        f"{_RANK} at all linear layers but the head, with the same first weights; QLoRA is NF4 with double "
        "quantization, TRL's by PEFT and bitsandbytes. Times are of all steps but the first; memory is the process's "
        f"largest resident size in training. Medians of {options.rounds} interleaved rounds, each run in a process of "
        "its own.\n\n"
        f"{describe_run('benchmarks.finetune', 'torch', 'transformers', 'trl', 'peft', 'bitsandbytes')}\n\n"
        f"{markdown([*header, 'largest difference'], rows)}"
    )


def _options() -> argparse.Namespace:
    options = read_options(
        "finetune",
        __doc__,
        rounds=3,
        steps={"type": int, "default": 4, "help": "of one run"},
        batch_size={"type": int, "default": 2, "help": "examples of a step"},
        length={"type": int, "default": 128, "help": "tokens of the longest example"},
        blocks={"type": int, "help": "keep so many blocks of the model, to try this script"},
        trained={
            "nargs": "+",
            "choices": [ALL, LORA, QLORA],
            "default": [ALL, LORA, QLORA],
            "help": "which of a model",
        },
        child={"help": argparse.SUPPRESS},
        folder={"help": argparse.SUPPRESS},
    )
    if options.quick:
        options.steps, options.blocks, options.length = 2, 1, 64
    return options


if __name__ == "__main__":
    main()
