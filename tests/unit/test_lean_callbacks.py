"""A lean handler calls what transformers' own calls, with the same, but for what a callback only inherits."""

import inspect

import pytest
from transformers import TrainerCallback, TrainerControl
from transformers.trainer_callback import CallbackHandler

from hfdist.trainer.step.lean_callbacks import LeanCallbackHandler, use_lean_handler

PARTS = ("model", "processing_class", "optimizer", "lr_scheduler")
EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


class Notes(TrainerCallback):
    def on_step_end(self, args, state, control, **named):
        self.given = args, state, control, named
        return TrainerControl(should_save=True)


class Silent(TrainerCallback):
    pass


def handler(*callbacks):
    made = CallbackHandler([*callbacks], *PARTS)
    made.train_dataloader, made.eval_dataloader = "train", "eval"
    return made


def lean(*callbacks):
    made = handler(*callbacks)
    use_lean_handler(made)
    assert type(made) is LeanCallbackHandler
    return made


@pytest.mark.parametrize("make", [handler, lean])
def test_gives_what_the_original_gives(make):
    notes, last = Notes(), Notes()
    control = make(notes, Silent(), last).call_event("on_step_end", 1, 2, 3, more=4)
    named = dict(zip(PARTS, PARTS, strict=True)) | {"train_dataloader": "train", "eval_dataloader": "eval", "more": 4}
    assert notes.given == (1, 2, 3, named)
    assert last.given[2].should_save
    assert control.should_save


@pytest.mark.parametrize("event", EVENTS)
def test_only_what_is_inherited_is_left_out(event, monkeypatch):
    called = []
    monkeypatch.setattr(TrainerCallback, event, lambda *args, **named: called.append("inherited"))
    silent, patched = Silent(), Silent()
    setattr(patched, event, lambda *args, **named: called.append("own"))
    own = lean(silent, patched)
    more = {"metrics": {}} if "metrics" in inspect.signature(getattr(own, event)).parameters else {}
    more |= {"logs": {}} if event == "on_log" else {}
    assert getattr(own, event)(1, 2, (control := TrainerControl()), **more) is control
    assert called == ["own"]


def test_a_handler_of_another_class_stays():
    class Other(CallbackHandler):
        pass

    other = Other([Silent()], *PARTS)
    use_lean_handler(other)
    assert type(other) is Other
