"""Checks `evaluate.*`, and the held-out data that it needs."""

from __future__ import annotations

import os

from hfdist.config.checks.conflict import conflict, shown
from hfdist.config.checks.data import check_source
from hfdist.config.run import Export, RunConfig
from hfdist.errors import ConfigError


def check_evaluate(config: RunConfig) -> None:
    """Raise a ConfigError on evaluations without data or steps, and on figures that nothing measures."""
    _check_held_out(config)
    _check_evaluation(config)
    _check_lm_eval(config)


def _check_held_out(config: RunConfig) -> None:
    data = config.data
    if data.eval_sources and data.eval_fraction > 0:
        what = "held-out documents are given, and a share of the training documents is held out as well"
        keys, allowed = "data.eval_fraction data.eval_sources", "0 where there are data.eval_sources"
        raise conflict(config, keys, what, allowed=allowed, hint="data.eval_fraction=0")
    for name, source in data.eval_sources.items():
        check_source(f"data.eval_sources.{name}", source)
        for leaf, value in (("weight", source.weight), ("epochs", source.epochs)):
            if value is not None:
                what, key = "held-out documents are all read, once", f"data.eval_sources.{name}.{leaf}"
                raise ConfigError(what, where=key, found=value, allowed="null", hint=f"{key}=null")
    if data.eval_fraction > 0 or data.eval_sources:
        return
    off = {
        "train.eval_every": "null", "evaluate.at_start": "false", "evaluate.prompts": "[]", "evaluate.metrics": "[]",
        "evaluate.patience": "null", "evaluate.export": "last",
    }  # fmt: skip
    wanted = [key for key, nothing in off.items() if shown(config, key) != nothing]
    if wanted:
        found = f"{shown(config, wanted[0])}, with data.eval_fraction=0 and no data.eval_sources"
        hint = "data.eval_fraction=0.02, data.eval_sources.val.path=val.jsonl, or "
        hint += " ".join(f"{key}={off[key]}" for key in wanted)
        raise ConfigError("nothing is held out to evaluate on", where=", ".join(wanted), found=found, hint=hint)


def _check_evaluation(config: RunConfig) -> None:
    evaluate, checkpoint, eval_every = config.evaluate, config.checkpoint, config.train.eval_every
    if evaluate.patience is not None and eval_every is None:
        what = "early stopping needs evaluations during the run"
        hint = f"train.eval_every={checkpoint.every or 100}, or evaluate.patience=null"
        raise conflict(config, "evaluate.patience train.eval_every", what, hint=hint)
    if evaluate.min_delta > 0 and evaluate.patience is None:
        what = "nothing is stopped early, so a smallest improvement has no meaning"
        every = "" if eval_every is not None else f" train.eval_every={checkpoint.every or 100}"
        hint = f"evaluate.patience=3{every}, or evaluate.min_delta=0"
        raise conflict(config, "evaluate.min_delta evaluate.patience", what, hint=hint)
    if evaluate.export is Export.best and (checkpoint.every is None or not checkpoint.keep_best):
        missing = [] if checkpoint.every is not None else [f"checkpoint.every={eval_every or 100}"]
        missing += [] if checkpoint.keep_best else ["checkpoint.keep_best=true"]
        missing += [] if eval_every is not None else [f"train.eval_every={checkpoint.every or 100}"]
        what = "the best model comes from a checkpoint, and none is kept for it"
        keys = "evaluate.export checkpoint.every checkpoint.keep_best"
        allowed = "last, or best with checkpoint.every and checkpoint.keep_best=true"
        hint = f"{' '.join(missing)}, or evaluate.export=last"
        raise conflict(config, keys, what, allowed=allowed, hint=hint)
    for index, prompt in enumerate(evaluate.prompts):
        if not prompt.strip():
            raise ConfigError("a prompt is empty", where=f"evaluate.prompts.{index}", found=prompt, allowed="text")


def _check_lm_eval(config: RunConfig) -> None:
    tasks, folder = config.evaluate.lm_eval, config.evaluate.lm_eval_include
    if tasks and config.adapter.is_used and not config.adapter.merge:
        what, hint = "the harness measures a whole model, and none is written", "adapter.merge=true"
        raise conflict(config, "evaluate.lm_eval adapter.merge", what, hint=hint)
    if folder is not None and not tasks:
        what = "no task is asked for, so a folder of tasks has no meaning"
        hint = "evaluate.lm_eval=[NAME], or evaluate.lm_eval_include=null"
        raise conflict(config, "evaluate.lm_eval_include", what, hint=hint)
    if folder is not None and not os.path.isdir(folder):
        allowed = "a folder of YAML files"
        raise conflict(config, "evaluate.lm_eval_include", "there is no such folder", allowed=allowed)
