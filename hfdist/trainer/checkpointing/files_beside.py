"""Files that a checkpoint holds beside its tensors: those of the model, and what the class's own `save_model` adds."""

from __future__ import annotations

import re
from pathlib import Path

from hfdist.collectives import on_all_ranks, on_rank_zero
from hfdist.trainer.checkpointing.model_files import read_files, write_model_files
from hfdist.trainer.checkpointing.save_options import SaveOptions
from hfdist.trainer.hooks import overrides
from hfdist.trainer.training import Training

_WRITTEN_ANYWAY = re.compile(r"(model|pytorch_model|adapter_model)\b.*|training_args\.bin")
"""Names of weights, and of the original's pickle."""


class FilesBeside:
    """Makes the files, of which rank 0 has the contents. All ranks call its methods together, but for `write`."""

    def __init__(self, training: Training, options: SaveOptions) -> None:
        self._training, self._options = training, options
        self._of_model: dict[str, bytes] | None = None
        self.asks_class = False
        """Whether the class's `save_model` is called for what it adds to a checkpoint, which has the weights itself."""

    def begin(self) -> None:
        """Forget the model of an earlier training."""
        self._of_model = None

    def read(self, name: str) -> dict[str, bytes]:
        """Give the contents by their paths in the checkpoint `name`."""
        if self._of_model is None:
            # Once: they do not change while a model is trained, and a large tokenizer takes long.
            rendered: dict[str, bytes] = {}
            on_rank_zero(lambda: rendered.update(read_files(self.write)))
            self._of_model = rendered
        return self._added(name) | self._of_model

    def _added(self, name: str) -> dict[str, bytes]:
        """Give what an overridden `save_model` writes beside the weights, which are written without it."""
        files: dict[str, bytes] = {}
        trainer = self._training.trainer
        if overrides(type(trainer), "save_model"):

            def write(folder: Path) -> None:
                (folder / name).mkdir()
                # The original calls it in the same way.
                self.asks_class = True
                try:
                    trainer.save_model(str(folder / name), _internal_call=True)
                finally:
                    self.asks_class = False

            on_all_ranks(lambda: files.update(read_files(write, leave_out=_WRITTEN_ANYWAY)))
        return {path.removeprefix(f"{name}/"): content for path, content in files.items()}

    def write(self, folder: Path) -> None:
        """Write the files of the model. On rank 0 alone."""
        trainer = self._training.trainer
        # The original takes the collator's, too, where the Trainer was given none.
        tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        write_model_files(self._training.model, tokenizer, folder)
        if self._options.write_more is not None:
            self._options.write_more(folder)
