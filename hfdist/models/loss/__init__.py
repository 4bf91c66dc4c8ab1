"""The training loss from hidden states, without all logits in memory."""
