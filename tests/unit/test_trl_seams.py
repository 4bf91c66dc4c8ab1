"""What hfdist knows of TRL without importing it: a new release that changes it must fail here first."""

import inspect

import pytest
import transformers
import trl
from accelerate import Accelerator
from peft import LoraConfig
from trl.trainer import sft_trainer

from hfdist.errors import ConfigError
from hfdist.trainer import sft, trl_trainers
from hfdist.trainer.named_arguments import arguments_by_name
from hfdist.trainer.trainer import DistributedTrainerMixin

LOSS = ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]


def mixed(kind):
    return type("Mixed", (DistributedTrainerMixin, kind), {})


def test_the_one_loss_that_sums_over_targets_is_known_by_its_name():
    assert trl_trainers.is_sft(mixed(trl.SFTTrainer))
    assert trl_trainers.sums_over_targets(mixed(transformers.Trainer))
    for kind in (trl.DPOTrainer, trl.KTOTrainer, trl.RewardTrainer, trl.GRPOTrainer):
        assert not trl_trainers.is_sft(mixed(kind))
        assert not trl_trainers.sums_over_targets(mixed(kind))


def test_a_loss_of_ones_own_on_top_is_not_known():
    own = type("Own", (trl.SFTTrainer,), {"compute_loss": lambda self, *_, **__: None})
    assert not trl_trainers.sums_over_targets(mixed(own))


@pytest.mark.parametrize("kind", [trl.SFTTrainer, trl.DPOTrainer])
def test_the_hooks_have_the_signature_that_we_override(kind):
    assert list(inspect.signature(kind.compute_loss).parameters) == LOSS
    assert list(inspect.signature(kind.log).parameters) == ["self", "logs", "start_time"]
    # The places of positional arguments are read off the class.
    assert list(inspect.signature(kind.__init__).parameters)[1] == "model"
    assert {"args", "train_dataset", "eval_dataset", "peft_config"} <= set(inspect.signature(kind.__init__).parameters)


def test_the_loss_is_divided_and_scaled_as_the_engines_expect():
    source = inspect.getsource(trl.SFTTrainer.compute_loss)
    assert "if num_items_in_batch is None else num_items_in_batch" in source
    assert "loss = loss * (self.accelerator.num_processes // self.get_tp_size())" in source
    assert trl.SFTTrainer.loss_is_scaled_for_ga is None


def test_metrics_are_gathered_and_kept_where_we_reach_them():
    source = inspect.getsource(trl.SFTTrainer.compute_loss)
    assert "self.accelerator.gather_for_metrics(" in source
    # Any other collective in it would wait for ranks that have no loss.
    assert "torch.distributed" not in source
    assert "accelerator.reduce" not in source
    assert '_metrics[mode]["entropy"]' in source
    assert "self._total_train_tokens" in source
    assert 'mode = "train" if self.model.training else "eval"' in inspect.getsource(trl.SFTTrainer.log)
    assert "gather_for_metrics" in vars(Accelerator)


def test_rows_without_padding_have_what_we_put_below_each_other():
    collate = sft_trainer.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    rows = [{"input_ids": [5, 6, 7], "labels": [5, -100, 7], "seq_lengths": [2, 1]}, {"input_ids": [8], "labels": [8]}]
    batch = sft.collate_rows(collate, rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 0], [0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, -100], [-100, -100, -100]]
    assert batch["hfdist_counted"].tolist() == [[True, True, True], [True, False, False]]
    assert list(batch) == ["input_ids", "labels", "position_ids", "hfdist_counted"]


def test_defaults_that_the_documentation_speaks_of():
    fields = trl.SFTConfig.__dataclass_fields__
    assert fields["bf16"].default is None  # which becomes True
    assert fields["gradient_checkpointing"].default is True
    assert fields["average_tokens_across_devices"].default is True


WITH_REFERENCE = (trl.DPOTrainer, trl.KTOTrainer, trl.GRPOTrainer, trl.RLOOTrainer)


@pytest.mark.parametrize("kind", [trl.SFTTrainer, trl.RewardTrainer, *WITH_REFERENCE])
def test_adapters_are_drawn_and_used_as_we_do_it(kind):
    source = inspect.getsource(kind.__init__)
    assert source.index("set_seed(args.seed)") < source.index("model = get_peft_model(model, peft_config, **")
    assert 'get_peft_model_kwargs["autocast_adapter_dtype"] = False' in source
    # Of a wrapped model it makes a copy, which we delete; without one it disables the adapter.
    assert ('model.add_adapter("ref", default_config)' in source) == (kind in WITH_REFERENCE)
    of_class = inspect.getsource(kind)
    assert ('adapter_name="ref" if "ref" in' in of_class) == (kind in WITH_REFERENCE)


def test_a_class_that_may_make_more_of_an_adapter_does_not_get_one():
    arguments = {"peft_config": LoraConfig(), "args": None}
    with pytest.raises(ConfigError, match="inject_adapter_in_model"):
        trl_trainers.check_trl_arguments(mixed(trl.DistillationTrainer), arguments, None)


class HandsOn(trl.DPOTrainer):
    def __init__(self, *more, **named):
        super().__init__(*more, **named)


class HasItsOwn(trl.SFTTrainer):
    def __init__(self, weight, *more, **named):
        super().__init__(*more, **named)


class PassesAllOn(trl.SFTTrainer):
    def __init__(self, *args, alpha=1, **kwargs):
        super().__init__(*args, **kwargs)


def test_positional_arguments_are_found_where_the_class_has_them():
    assert arguments_by_name(mixed(trl.SFTTrainer), ("m", "a"), {"peft_config": 1}) == {
        "model": "m",
        "args": "a",
        "peft_config": 1,
    }
    for kind in (trl.DPOTrainer, HandsOn):
        assert arguments_by_name(mixed(kind), ("m", "r", "a"), {}) == {"model": "m", "ref_model": "r", "args": "a"}
    assert arguments_by_name(mixed(HasItsOwn), (2,), {"model": "m"}) == {"weight": 2, "model": "m"}
    named = {"model": "m", "args": "a"}
    assert arguments_by_name(mixed(PassesAllOn), (), {**named, "alpha": 2}) == {**named, "alpha": 2}
    with pytest.raises(ConfigError, match="which of these arguments is the model"):
        arguments_by_name(mixed(HasItsOwn), (2, "m"), {})
    with pytest.raises(ConfigError, match="modle"):
        arguments_by_name(mixed(trl.SFTTrainer), (), {"model": "m", "modle": 1})
