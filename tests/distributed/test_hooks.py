"""Methods of a class after the mixin: each is called where the original calls it, or refused by its name."""

import inspect

import pytest
import torch
from transformers import Trainer

import hfdist
from hfdist.config.strategy import Sharding, StrategyConfig
from hfdist.errors import ConfigError
from hfdist.testing import run_ranks
from hfdist.trainer.hooks import NEVER_CALLED, check_hooks
from tests.distributed.trainers import (
    history,
    make_arguments,
    make_model,
    make_strategy,
    make_trainer,
    on_ranks,
    uneven_items,
)

pytestmark = pytest.mark.distributed

ALL = [name for name, value in vars(Trainer).items() if inspect.isfunction(value) and not name.startswith("__")]
OF_WHOLE_OUTPUTS = {"compute_loss", "prediction_step"}
"""What a pipeline refuses."""
OF_THE_ORIGINAL_STEP = {"autocast_smart_context_manager", "get_cp_size", "get_tp_size"}
"""What only transformers' own step asks itself, and a pipeline has a step of its own."""


def noting(names, called):
    """Give a class of a user's that overrides these methods, and notes which are called."""

    def override(name):
        def method(self, *args, **named):
            called.add(name)
            return getattr(super(kind, self), name)(*args, **named)

        return method

    kind = type("User", (Trainer,), {name: override(name) for name in names})
    return kind


def mixed(kind):
    return type("Mixed", (hfdist.DistributedTrainerMixin, kind), {})


def live(trainer, folder, *, predicts=True):
    """Do what a training calls, with saves, evaluations and a resume."""
    trainer.train()
    trainer.evaluate()
    if predicts:
        trainer.predict(uneven_items(3))
    trainer.save_model(str(folder / "model"))
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))


LIFE = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 2,
        "load_best_model_at_end": True, "weight_decay": 0.5}  # fmt: skip


def called_by_the_original(folder):
    called: set[str] = set()
    items = uneven_items()
    given = make_arguments(folder, **LIFE, per_device_train_batch_size=8)
    live(noting(ALL, called)(make_model(), given, train_dataset=items, eval_dataset=items[:6]), folder)
    return called


def called_in(folder, names, **layout):
    called: set[str] = set()
    kind = mixed(noting(set(ALL) - NEVER_CALLED.keys() - set(names), called))
    trainer = make_trainer(folder, make_strategy(micro_batch_size=2, **layout), kind=kind, arguments=LIFE)
    live(trainer, folder, predicts=not layout)
    return called


def test_each_hook_is_called_or_refused(tmp_path):
    """All methods of the Trainer are tried, so that a new one of either side cannot be forgotten."""

    def one_process():
        return called_by_the_original(tmp_path / "original"), called_in(tmp_path / "one", set())

    def pipeline():
        return called_in(tmp_path / "two", OF_WHOLE_OUTPUTS, pipeline=2)

    original, ours = run_ranks(one_process, 1)[0]
    expected = original - NEVER_CALLED.keys()
    assert {"prediction_step", "save_model", "get_decay_parameter_names", "_get_eval_sampler"} <= expected
    assert expected - ours == set()
    for called in run_ranks(pipeline, 2):
        assert expected - called - OF_WHOLE_OUTPUTS - OF_THE_ORIGINAL_STEP == {"predict", "get_test_dataloader"}


@pytest.mark.parametrize("name", [*NEVER_CALLED, "prediction_step"])
def test_what_is_not_called_is_refused_by_its_name(name):
    degrees = StrategyConfig(pipeline=2) if name in OF_WHOLE_OUTPUTS else StrategyConfig()
    with pytest.raises(ConfigError) as refused:
        check_hooks(mixed(noting([name], set())), degrees.topology(2))
    assert refused.value.where == f"Mixed.{name}"
    assert refused.value.found == "that of User"


def test_a_class_whose_methods_are_hidden_is_refused():
    kind = type("Mine", (hfdist.Trainer, noting(["log"], set())), {})
    with pytest.raises(ConfigError, match="hides its methods") as refused:
        check_hooks(kind, StrategyConfig().topology(1))
    assert refused.value.hint == "class Mine(hfdist.DistributedTrainerMixin, User)"


class OwnDecay(Trainer):
    """Rules of decay and of saving as users write them."""

    def get_decay_parameter_names(self, model):
        return [name for name, parameter in model.named_parameters() if parameter.ndim == 2 and "proj" in name]

    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            with open(f"{output_dir}/notes.txt", "w") as file:
                file.write("mine")


def decayed(folder, kind, strategy=None):
    more = {"max_steps": 2, "weight_decay": 5.0, "save_strategy": "steps", "save_steps": 2}
    if strategy is None:
        given = make_arguments(folder, **more, per_device_train_batch_size=8)
        trainer = kind(make_model(), given, train_dataset=uneven_items())
    else:
        trainer = make_trainer(folder, strategy, kind=kind, arguments=more)
    trainer.train()
    # All ranks have written.
    if strategy is not None:
        trainer.checkpointer.wait()
    assert (folder / "checkpoint-2" / "notes.txt").read_text() == "mine"
    trainer.save_model(str(folder / "model"))
    return trainer


def test_own_rules_of_decay_and_files_hold_in_each_layout(tmp_path):
    from safetensors.torch import load_file

    run_ranks(lambda: decayed(tmp_path / "original", OwnDecay) and None, 1)

    def layouts():
        for name, layout in {"ddp": {}, "pipeline": {"pipeline": 2}, "fsdp2": {"sharding": Sharding.fsdp2}}.items():
            decayed(tmp_path / name, mixed(OwnDecay), make_strategy(micro_batch_size=2, **layout))

    run_ranks(layouts, 2)
    run_ranks(lambda: decayed(tmp_path / "zero3", mixed(OwnDecay), make_strategy(Sharding.zero3)) and None, 2)
    expected = load_file(tmp_path / "original" / "model" / "model.safetensors")
    for name in ("ddp", "pipeline", "fsdp2", "zero3"):
        found = load_file(tmp_path / name / "model" / "model.safetensors")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=f"{key} in {name}")


class WithoutSuper(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


@on_ranks(2)
def test_a_step_of_ones_own_is_refused_where_ranks_compute_one_loss_together(tmp_path):
    trainer = make_trainer(tmp_path, make_strategy(Sharding.fsdp2, tensor=2), kind=mixed(WithoutSuper))
    with pytest.raises(ConfigError, match="as if it were the whole") as refused:
        trainer.train()
    assert refused.value.where == "Mixed.training_step"


class Silent(Trainer):
    def _clip_grad_norm(self, model):
        super()._clip_grad_norm(model)


@on_ranks(1)
def test_gradients_are_reduced_once_whatever_an_override_returns(tmp_path):
    found = []
    for kind in (Trainer, Silent):
        trainer, norms = make_trainer(tmp_path, kind=mixed(kind)), []
        clip = trainer.engine.clip_grad_norm
        trainer.engine.clip_grad_norm = lambda norm, clip=clip, norms=norms: norms.append(norm) or clip(norm)
        trainer.train()
        assert norms == [1.0] * 4
        found.append(history(trainer))
    assert found[0] == found[1]
