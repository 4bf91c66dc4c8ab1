"""One start of `benchmarks.start`, in a process of its own: clocks are read at the end of each stage.

python -m benchmarks.starts CONTENDER MARKS FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}  # fmt: skip
"""As `model=tiny` has them."""
NUM_SEQUENCES, SEQUENCE_TOKENS = 8, 64
COMPILED_SIZES = SIZES | {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8}
NUM_STEADY_STEPS = 8


class Marks:
    """CPU and wall seconds of each stage, the start of Python included in the first."""

    def __init__(self) -> None:
        self.stages: dict[str, list[float]] = {}
        self._cpu, self._wall = 0.0, float(os.environ["BEGAN"])

    def end(self, stage: str) -> None:
        """The stage ends here."""
        cpu, wall = time.process_time(), time.time()
        self.stages[stage] = [cpu - self._cpu, wall - self._wall]
        self._cpu, self._wall = cpu, wall


class Started(Exception):
    """The first step is done."""


def stop_after_the_first_step(marks: Marks) -> Any:
    """A callback for a Trainer."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            marks.end("first step")
            raise Started

    return Stop()


def start_hfdist(marks: Marks, folder: str) -> None:
    """The steps of recipes/pretrain.py."""
    from hfdist.config.composition.compose import compose_config
    from hfdist.garbage_collector import quick_imports

    config = compose_config([
        "model=tiny", "strategy=single", "data.workers=0", f"data.sequence_length={SEQUENCE_TOKENS}",
        "data.eval_sequences=16",
        f"train.global_batch_size={NUM_SEQUENCES}", f"train.micro_batch_size={NUM_SEQUENCES}", "train.max_steps=1",
        "checkpoint=none", "report=quiet", f"run.dir={folder}",
    ])  # fmt: skip
    marks.end("config")
    with quick_imports():
        from hfdist.run.builder import Run
    marks.end("imports")
    run = Run(config)
    run.find_model()
    run.open_data()
    run.open_folder()
    marks.end("data")
    run.start_ranks()
    run.build_model()
    run.build_trainer()
    run.trainer.add_callback(stop_after_the_first_step(marks))
    marks.end("model and Trainer")
    run.train()


def start_hf_trainer(marks: Marks, folder: str) -> None:
    """A plain script."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    marks.end("imports")
    arguments = TrainingArguments(
        folder, max_steps=1, per_device_train_batch_size=NUM_SEQUENCES, use_cpu=True, report_to="none",
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    tokens = torch.randint(SIZES["vocab_size"], (NUM_SEQUENCES, SEQUENCE_TOKENS))
    trainer = Trainer(
        LlamaForCausalLM(LlamaConfig(**SIZES)),
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[stop_after_the_first_step(marks)],
    )
    marks.end("model and Trainer")
    trainer.train()


def start_accelerate(marks: Marks, folder: str) -> None:
    """A loop of one's own."""
    import torch
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM

    marks.end("imports")
    accelerator = Accelerator(cpu=True)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(SIZES["vocab_size"], (NUM_SEQUENCES, SEQUENCE_TOKENS))
    loader = torch.utils.data.DataLoader(tokens, batch_size=NUM_SEQUENCES)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    marks.end("model and loop")
    for batch in loader:
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
    marks.end("first step")


def start_lightning(marks: Marks, folder: str) -> None:
    """A LightningModule."""
    import lightning
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    marks.end("imports")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = LlamaForCausalLM(LlamaConfig(**SIZES))

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    tokens = torch.randint(SIZES["vocab_size"], (NUM_SEQUENCES, SEQUENCE_TOKENS))
    loader = torch.utils.data.DataLoader(tokens, batch_size=NUM_SEQUENCES)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    marks.end("model and Trainer")
    trainer.fit(Module(), loader)
    marks.end("first step")


def start_libraries(marks: Marks, folder: str) -> None:
    """What no Trainer goes without."""
    import torch  # noqa: F401
    from transformers import Trainer, TrainingArguments  # noqa: F401

    marks.end("imports")


def start_config(marks: Marks, folder: str) -> None:
    """The config room."""
    import hfdist.config  # noqa: F401

    marks.end("imports")


def compile_and_step(marks: Path, how: str) -> None:
    """CPU seconds of the first step of a compiled model, of a later one, and of one that is not compiled."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.rounds import cpu_seconds_of
    from hfdist.models.blocks import compile_blocks

    def seconds_of_step() -> float:
        return cpu_seconds_of(lambda: model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward())

    torch.set_num_threads(1)
    model: Any = LlamaForCausalLM(LlamaConfig(**COMPILED_SIZES)).train()
    tokens = torch.randint(SIZES["vocab_size"], (2, 2 * SEQUENCE_TOKENS))
    eager = sorted(seconds_of_step() for _ in range(NUM_STEADY_STEPS))
    if how == "blocks":
        compile_blocks(model)
    else:
        model.compile()
    cold = seconds_of_step()
    seconds_of_step()
    steady = sorted(seconds_of_step() for _ in range(NUM_STEADY_STEPS))
    middle = NUM_STEADY_STEPS // 2
    marks.write_text(json.dumps({"cold": cold, "steady": steady[middle], "eager": eager[middle]}))


STARTS = {
    "hfdist": start_hfdist,
    "HF Trainer": start_hf_trainer,
    "accelerate": start_accelerate,
    "lightning": start_lightning,
    "imports of torch and transformers.Trainer": start_libraries,
    "import hfdist.config": start_config,
}

if __name__ == "__main__":
    contender, marks_path, rest = sys.argv[1:]
    if contender == "compile":
        compile_and_step(Path(marks_path), rest)
    else:
        clock = Marks()
        with suppress(Started):
            STARTS[contender](clock, rest)
        Path(marks_path).write_text(json.dumps(clock.stages))
