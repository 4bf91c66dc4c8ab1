"""What evaluations, what they are made on, and what follows from them must satisfy together."""

from __future__ import annotations

from pathlib import Path

from hfdist.config.checks.data import check_source
from hfdist.config.data import DataConfig
from hfdist.config.run import EvaluateConfig, Export, RunConfig
from hfdist.errors import ConfigError


def check_evaluation(config: RunConfig) -> None:
    """Check `evaluate.*`, and what is held out.

    Raises:
        ConfigError: the first contradiction that is found.
    """
    _check_sources(config.data)
    _check_is_held_out(config)
    _check_stopping(config)
    _check_export(config)
    _check_texts(config.evaluate)
    _check_lm_eval(config)


def _check_sources(data: DataConfig) -> None:
    if data.eval_sources and data.eval_fraction > 0:
        raise ConfigError(
            "held-out documents are given, and a share of the training documents is held out as well",
            where="data.eval_fraction",
            found=f"{data.eval_fraction:g}, with data.eval_sources: {', '.join(data.eval_sources)}",
            allowed="0 where there are data.eval_sources",
            hint="data.eval_fraction=0",
        )
    for name, source in data.eval_sources.items():
        key = f"data.eval_sources.{name}"
        check_source(key, source)
        for leaf in ("weight", "epochs"):
            if getattr(source, leaf) is not None:
                raise ConfigError(
                    "held-out documents are all read, once",
                    where=f"{key}.{leaf}",
                    found=getattr(source, leaf),
                    allowed="null",
                    hint=f"{key}.{leaf}=null",
                )


def _check_is_held_out(config: RunConfig) -> None:
    if config.data.eval_fraction > 0 or config.data.eval_sources:
        return
    evaluate = config.evaluate
    wishes = {
        "train.eval_every": (config.train.eval_every, "null"),
        "evaluate.at_start": (evaluate.at_start, "false"),
        "evaluate.prompts": (evaluate.prompts, "[]"),
        "evaluate.metrics": (evaluate.metrics, "[]"),
    }
    wanted = {key: off for key, (value, off) in wishes.items() if value}
    if wanted:
        key = next(iter(wanted))
        raise ConfigError(
            "nothing is held out to evaluate on",
            where=", ".join(wanted),
            found=f"{wishes[key][0]}, with data.eval_fraction=0 and no data.eval_sources",
            hint="data.eval_fraction=0.02, data.eval_sources.val.path=val.jsonl, or "
            f"{' '.join(f'{key}={off}' for key, off in wanted.items())}",
        )


def _check_stopping(config: RunConfig) -> None:
    evaluate = config.evaluate
    if evaluate.patience is not None and config.train.eval_every is None:
        raise ConfigError(
            "only evaluations during the run can stop it",
            where="evaluate.patience",
            found=f"{evaluate.patience}, with train.eval_every=null",
            hint=f"train.eval_every={config.checkpoint.every or 100}, or evaluate.patience=null",
        )
    if evaluate.min_delta > 0 and evaluate.patience is None:
        raise ConfigError(
            "nothing is stopped early, so a smallest improvement has no meaning",
            where="evaluate.min_delta",
            found=f"{evaluate.min_delta:g}, with evaluate.patience=null",
            hint="evaluate.patience=3, or evaluate.min_delta=0",
        )


def _check_export(config: RunConfig) -> None:
    checkpoint = config.checkpoint
    if config.evaluate.export is Export.best and (checkpoint.every is None or not checkpoint.keep_best):
        keys = f"checkpoint.every={'null' if checkpoint.every is None else checkpoint.every}"
        eval_every = config.train.eval_every
        missing: dict[str, object] = {"checkpoint.every": eval_every or 100} if checkpoint.every is None else {}
        missing |= {} if checkpoint.keep_best else {"checkpoint.keep_best": "true"}
        missing |= {} if eval_every is not None else {"train.eval_every": checkpoint.every or 100}
        raise ConfigError(
            "the best model is that of a checkpoint, and none is kept for it",
            where="evaluate.export",
            found=f"best, with {keys} and checkpoint.keep_best={str(checkpoint.keep_best).lower()}",
            allowed="last, or best with checkpoint.every and checkpoint.keep_best=true",
            hint=f"{' '.join(f'{key}={value}' for key, value in missing.items())}, or evaluate.export=last",
        )


def _check_texts(evaluate: EvaluateConfig) -> None:
    for index, prompt in enumerate(evaluate.prompts):
        if not prompt.strip():
            raise ConfigError("a prompt is empty", where=f"evaluate.prompts[{index}]", found=prompt, allowed="text")


def _check_lm_eval(config: RunConfig) -> None:
    evaluate, adapter = config.evaluate, config.adapter
    if evaluate.lm_eval and adapter.is_used and not adapter.merge:
        raise ConfigError(
            "the harness measures a whole model, and none is written",
            where="evaluate.lm_eval",
            found=f"{', '.join(evaluate.lm_eval)}, with adapter.merge=false",
            hint="adapter.merge=true",
        )
    folder = evaluate.lm_eval_include
    if folder is None:
        return
    if not evaluate.lm_eval:
        raise ConfigError(
            "no task is asked for, so a folder of tasks has no meaning",
            where="evaluate.lm_eval_include",
            found=folder,
            hint="evaluate.lm_eval=[NAME], or evaluate.lm_eval_include=null",
        )
    if not Path(folder).is_dir():
        raise ConfigError(
            "there is no such folder", where="evaluate.lm_eval_include", found=folder, allowed="a folder of YAML files"
        )
