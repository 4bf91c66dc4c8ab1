"""What travels between stages: taken apart, described as text, and put together again."""

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import BaseModelOutputWithPast

from hfdist.pipeline.stage_io import Absent, Activations, Header, unpack

HIDDEN = torch.randn(2, 3, 4, requires_grad=True)
ACTIVATIONS = {
    "tensor": Activations({"0.0": HIDDEN}),
    "nested tuples": Activations({"0.0": (HIDDEN, (None, (torch.randn(2), 3.5)), [True, "eager"])}),
    "dict": Activations({"0.0": {"hidden": HIDDEN, "losses": {"router": torch.randn(())}}}),
    "model output": Activations(
        {"0.0": BaseModelOutputWithPast(last_hidden_state=HIDDEN, attentions=(torch.rand(1),))}
    ),
    "other types": Activations(
        {"0.0": (torch.tensor([[True], [False]]), torch.arange(6).view(2, 3), HIDDEN.bfloat16())}
    ),
    "several blocks": Activations({"0.0": HIDDEN, "1.0": (HIDDEN.detach(), None), "1.1": HIDDEN * 2}),
    "entries": Activations(
        {"0.0": HIDDEN}, {"cache": {"keys": torch.rand(2)}, "1": {0: HIDDEN.detach(), 2: (None, HIDDEN)}}
    ),
    "absent": Activations({"0.0": (HIDDEN, Absent((2, 1), torch.bfloat16))}),
    "empty": Activations(),
    "no elements": Activations({"0.0": (HIDDEN, torch.empty(0, 5))}),
}


@pytest.mark.parametrize("activations", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_a_description_survives_as_text(activations):
    header, tensors = unpack(activations)
    arrived = Header.from_json(header.to_json())
    assert arrived == header
    again = arrived.pack(tensors)
    assert type(again.outputs.get("0.0")) is type(activations.outputs.get("0.0"))
    assert unpack(again)[0] == header
    sent, received = (tree_leaves((p.outputs, p.entries)) for p in (activations, again))
    assert len(sent) == len(received)
    for before, after in zip(sent, received, strict=True):
        assert before is after if isinstance(before, torch.Tensor) else before == after
    # The receiver allocates by these.
    for meta, tensor in zip(header.metas, tensors, strict=True):
        assert (meta.shape, meta.dtype, meta.requires_grad) == (tensor.shape, tensor.dtype, tensor.requires_grad)


class Cache:
    pass


def test_objects_of_other_classes_are_refused():
    header, _ = unpack(Activations({"0.0": (HIDDEN, Cache())}))
    with pytest.raises(TypeError, match="return a Cache, which cannot travel"):
        header.to_json()
