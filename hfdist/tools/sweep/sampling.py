"""Values of the next trial: from a grid, at random, or by Optuna's tree-structured Parzen estimator."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hfdist.config.override_text import as_text
from hfdist.config.sweep import Sampler, SweepConfig
from hfdist.records.trials import Trial
from hfdist.tools.sweep.halving import rungs_of
from hfdist.tools.sweep.space import Dimension, Space

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial
    from optuna.trial import Trial as OptunaTrial

_MOST_STARTS = 10
"""Most trials with random values before TPE chooses."""
_LEAST_FOR_IMPORTANCE = 8
"""Least number of trials that have come to their end, for importances."""


def choose_values(config: SweepConfig, space: Space, trials: Sequence[Trial]) -> dict[str, object]:
    """Give the values of the next trial: a function of the earlier ones, of the seed and of its number alone.

    Trials without a result count as bad ones, so that trials that run side by side differ.
    """
    number = len(trials)
    if config.sampler is Sampler.grid:
        return space.grid(number + 1)[number]
    # Imported here: only a sweep that chooses needs it.
    import optuna

    # The seed is of the trial's number, too: each trial has a new sampler, which would else draw the same values.
    digest = hashlib.blake2b(f"{config.seed} {number}".encode(), digest_size=4).digest()
    seed = int.from_bytes(digest, "little")
    sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed=seed)
    if config.sampler is Sampler.tpe:
        starts = min(_MOST_STARTS, max(config.trials // 4, 1))
        # Each key by itself: with tens of trials that was better than all together (`multivariate`).
        with warnings.catch_warnings(category=optuna.exceptions.ExperimentalWarning, action="ignore"):
            sampler = optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=starts, multivariate=False, constant_liar=True
            )
    study = _make_study(config, space, trials, sampler=sampler)
    asked = study.ask()
    values: dict[str, object] = {}
    for dimension in space.dimensions:
        if dimension.holds(values):
            values[dimension.key] = _suggest(asked, dimension)
    return values


def write_study(config: SweepConfig, space: Space, trials: Sequence[Trial], path: Path) -> None:
    """Write the trials as a journal of Optuna, for its dashboard and its plots; one that is there is replaced."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.unlink(missing_ok=True)
    storage = JournalStorage(JournalFileBackend(str(unfinished)))
    _make_study(config, space, trials, storage=storage, name=path.parent.name)
    unfinished.replace(path)


def importances(config: SweepConfig, space: Space, trials: Sequence[Trial]) -> dict[str, float]:
    """Give the importance of each key for the metric (PED-ANOVA), the highest first; empty: too few trials."""
    import optuna

    done = [
        trial for trial in trials if len(trial.results) == rungs_of(config, trial.number) and trial.value is not None
    ]
    keys = [one.key for one in space.dimensions if all(one.key in trial.values for trial in done)]
    if len(done) < _LEAST_FOR_IMPORTANCE or len(keys) < 2:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    shares = optuna.importance.get_param_importances(_make_study(config, space, done), evaluator=evaluator, params=keys)
    return {key: float(share) for key, share in shares.items()}


def _make_study(
    config: SweepConfig,
    space: Space,
    trials: Sequence[Trial],
    *,
    sampler: BaseSampler | None = None,
    storage: BaseStorage | None = None,
    name: str | None = None,
) -> Study:
    """Give an Optuna study of the trials."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction=config.direction.value, sampler=sampler, storage=storage, study_name=name)
    for trial in trials:
        study.add_trial(_as_optuna(config, space, trial))
    return study


def _as_optuna(config: SweepConfig, space: Space, trial: Trial) -> FrozenTrial:
    import optuna

    dimensions = {one.key: one for one in space.dimensions if one.key in trial.values}
    values = {result.tokens: result.value for result in trial.results if result.value is not None}
    state, last = optuna.trial.TrialState.RUNNING, trial.value
    if trial.failure is not None or (trial.results and last is None):
        state = optuna.trial.TrialState.FAIL
    elif last is not None:
        is_whole = len(trial.results) == rungs_of(config, trial.number)
        state = optuna.trial.TrialState.COMPLETE if is_whole else optuna.trial.TrialState.PRUNED
    return optuna.trial.create_trial(
        state=state,
        value=last if state is optuna.trial.TrialState.COMPLETE else None,
        params={
            key: as_text(trial.values[key]) if dimension.choices else trial.values[key]
            for key, dimension in dimensions.items()
        },
        distributions={key: _distribution(dimension) for key, dimension in dimensions.items()},
        intermediate_values=values,
    )


def _distribution(dimension: Dimension) -> BaseDistribution:
    from optuna import distributions

    if dimension.choices:
        # As text: a choice may be a list, which Optuna does not take.
        return distributions.CategoricalDistribution(dimension.texts)
    if dimension.is_whole:
        return distributions.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.is_log)
    return distributions.FloatDistribution(dimension.low, dimension.high, log=dimension.is_log)


def _suggest(asked: OptunaTrial, dimension: Dimension) -> object:
    if dimension.choices:
        chosen = asked.suggest_categorical(dimension.key, dimension.texts)
        return dimension.choices[dimension.texts.index(chosen)]
    if dimension.is_whole:
        return asked.suggest_int(dimension.key, int(dimension.low), int(dimension.high), log=dimension.is_log)
    value = float(f"{asked.suggest_float(dimension.key, dimension.low, dimension.high, log=dimension.is_log):.6g}")
    # Clamped, as rounding may have left the interval.
    return min(max(value, dimension.low), dimension.high)
