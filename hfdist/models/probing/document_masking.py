"""Find out whether a model keeps packed documents apart, by asking it."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

_FIRST, _SECOND = 6, 5


@torch.no_grad()
def keeps_documents_apart(model: PreTrainedModel) -> bool | None:
    """Change the first of two packed documents, and see whether the second one's logits move.

    transformers masks across documents where positions restart, but only in models whose attention is masked by
    positions: recurrent models, and some with positions of their own, see through.

    Args:
        model: whole, on the CPU.

    Returns:
        None where the question cannot be asked here: a model that ZeRO-3 has cut, or a kernel that needs a GPU.
    """
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return None
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.arange(1, 1 + _FIRST + _SECOND).remainder(vocab_size)[None]
    changed = ids.clone()
    changed[:, :_FIRST] = (changed[:, :_FIRST] + vocab_size // 2) % vocab_size
    positions = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])[None]
    was_training, used_cache = model.training, getattr(model.config, "use_cache", None)
    model.eval()
    # As in training: with a cache, restarting positions are not looked at.
    model.config.use_cache = False
    try:
        before, after = (
            model(input_ids=tokens, position_ids=positions).logits[:, _FIRST:] for tokens in (ids, changed)
        )
    except (TypeError, ValueError, RuntimeError, ImportError):
        return None
    finally:
        model.train(was_training)
        model.config.use_cache = used_cache
    return torch.allclose(before, after, rtol=1e-3, atol=1e-4 * float(before.abs().max()))
