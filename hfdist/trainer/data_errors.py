"""What is wrong with data of which nothing can be trained or evaluated."""

from __future__ import annotations

from hfdist.data import TokenStream
from hfdist.errors import ConfigError, DataError


def no_step_in_pass(step: int) -> DataError:
    """Give the error of a pass over a program's own data that gave no step, after step `step`."""
    what, found = f"a pass over the training data gave no step, after step {step}", "no batch of rows"
    hint = "data whose __iter__ begins anew at each call; or max_steps that one pass has rows for"
    return DataError(what, where="train_dataset", found=found, hint=hint)


def nothing_to_train_on() -> DataError:
    """Give the error of a stream that has ended before its first step."""
    what = "the data have ended, and there was nothing in them to train on"
    found = "only rows that are empty, bad, held out or quarantined"
    return DataError(what, where="data.sources", found=found, hint="hfdist audit run=... counts them")


def check_eval_data(data: object, *, is_needed: bool) -> None:
    """Raise a ConfigError on what is no dataset to evaluate on; `is_needed`: None is none, either."""
    if data is None and is_needed:
        hint = "evaluate(eval_dataset), or eval_dataset=... for the trainer"
        raise ConfigError("there is nothing to evaluate on", where="eval_dataset", found="None", hint=hint)
    if isinstance(data, TokenStream):
        what, hint = "a stream may have no end, and gives each rank its own part", "the held-out set of open_corpus"
        raise ConfigError(what, where="eval_dataset", found="a TokenStream", hint=hint)
