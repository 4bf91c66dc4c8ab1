"""One of several ranks on one GPU, over gloo, since NCCL takes one rank a device: torchrun -m proofs.gpu_ranks RECIPE.

Each rank takes itself for the only one of its machine, and so the first GPU. Collectives and sends then carry tensors
of the GPU, as they do between machines: what moves between devices and streams is that of a real run.
"""

import os
import sys

os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

from transformers import TrainingArguments

from hfdist.__main__ import main

_prepare = TrainingArguments.__post_init__


def _over_gloo(arguments: TrainingArguments) -> None:
    arguments.ddp_backend = "gloo"
    _prepare(arguments)


TrainingArguments.__post_init__ = _over_gloo  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main())
