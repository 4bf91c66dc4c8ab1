"""How the loss of a training step is computed from hidden states, without all logits in memory (`model.loss`)."""

from hfdist.models.loss.choose import LossHead, UntriedError, choose_loss, refuse_model

__all__ = ["LossHead", "UntriedError", "choose_loss", "refuse_model"]
