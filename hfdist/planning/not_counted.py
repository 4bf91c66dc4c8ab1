"""What a plan leaves out of a run, in a sentence: images, and answers that the run samples."""

from __future__ import annotations

from transformers import PreTrainedConfig

from hfdist.config.run import RunConfig
from hfdist.models.image_text import may_read_images

_IMAGES = "It counts no images: what reads them takes memory and time besides, unless data.images.used=false."
_ANSWERS = (
    "It counts prompts only: the run also samples answers, and a forward has task.num_generations of them for each."
)
_OWN_ANSWERS = "It counts steps that learn from the rows: in task.on_policy of the steps the run also samples answers."


def not_counted(config: RunConfig, architecture: PreTrainedConfig) -> str:
    """Say what a plan of this run leaves out; empty: nothing of its steps."""
    task = config.task
    may_see = may_read_images(architecture) and config.data.images.used is not False
    answers = _ANSWERS if task.name.traits.is_reinforcement else _OWN_ANSWERS if task.answers_prompts else ""
    return " ".join(note for note in (_IMAGES if may_see else "", answers) if note)
