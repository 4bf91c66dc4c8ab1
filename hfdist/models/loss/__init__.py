"""How the loss of a training step is computed from hidden states, without all logits in memory (`model.loss`)."""

from hfdist.models.loss.choose import LossHead, UntriedError, choose_loss, why_model_needs_logits

__all__ = ["LossHead", "UntriedError", "choose_loss", "why_model_needs_logits"]
