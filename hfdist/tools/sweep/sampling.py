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
    from optuna.trial import FrozenTrial, TrialState
    from optuna.trial import Trial as OptunaTrial

_MOST_STARTS = 10
"""Most trials with random values before TPE chooses."""
_LEAST_FOR_IMPORTANCE = 8
"""Importances are estimated only from at least this many trials that have come to their end."""


def choose_values(config: SweepConfig, space: Space, trials: Sequence[Trial]) -> dict[str, object]:
    """Give the values of the next trial: a function of the earlier ones, of the seed and of its number alone.

    Trials without a result count as bad ones, so that trials that run side by side differ.
    """
    number = len(trials)
    if config.sampler is Sampler.grid:
        return space.grid(number + 1)[number]
    study = _make_study(config, space, trials, sampler=_make_sampler(config, number))
    optuna_trial = study.ask()
    values: dict[str, object] = {}
    for dimension in space.dimensions:
        if dimension.holds(values):
            values[dimension.key] = _suggest(optuna_trial, dimension)
    return values


def _make_sampler(config: SweepConfig, number: int) -> BaseSampler:
    """Give a sampler for the trial of this number."""
    # Imported here, as in all functions below: optuna is optional, and a grid does not need it.
    import optuna

    # The number is a part of the seed: each trial has a new sampler, which would else draw the same values.
    digest = hashlib.blake2b(f"{config.seed} {number}".encode(), digest_size=4).digest()
    seed = int.from_bytes(digest, "little")
    if config.sampler is not Sampler.tpe:
        return optuna.samplers.RandomSampler(seed=seed)
    starts = min(_MOST_STARTS, max(config.trials // 4, 1))
    # `multivariate`: with tens of trials, each key by itself was better than all together. `constant_liar`, which is
    # experimental, takes trials that run for bad ones.
    with warnings.catch_warnings(category=optuna.exceptions.ExperimentalWarning, action="ignore"):
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=starts, multivariate=False, constant_liar=True)


def write_study(config: SweepConfig, space: Space, trials: Sequence[Trial], path: Path) -> None:
    """Write the trials as a journal of Optuna, for its dashboard and its plots; an earlier journal is replaced."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.unlink(missing_ok=True)
    storage = JournalStorage(JournalFileBackend(str(unfinished)))
    _make_study(config, space, trials, storage=storage, name=path.parent.name)
    unfinished.replace(path)


def importances(config: SweepConfig, space: Space, trials: Sequence[Trial]) -> dict[str, float]:
    """Give the share of each key in the metric's differences (PED-ANOVA), the highest first; empty: too few trials."""
    import optuna

    done = [
        trial for trial in trials if len(trial.results) == rungs_of(config, trial.number) and trial.value is not None
    ]
    keys = [dimension.key for dimension in space.dimensions if all(dimension.key in trial.values for trial in done)]
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
    """Give a trial as a trial of Optuna, with its values by tokens."""
    import optuna

    dimensions = {dimension.key: dimension for dimension in space.dimensions if dimension.key in trial.values}
    state = _optuna_state(config, trial)
    return optuna.trial.create_trial(
        state=state,
        value=trial.value if state is optuna.trial.TrialState.COMPLETE else None,
        params={
            key: as_text(trial.values[key]) if dimension.choices else trial.values[key]
            for key, dimension in dimensions.items()
        },
        distributions={key: _distribution(dimension) for key, dimension in dimensions.items()},
        intermediate_values={result.tokens: result.value for result in trial.results if result.value is not None},
    )


def _optuna_state(config: SweepConfig, trial: Trial) -> TrialState:
    """Give what Optuna calls the state of a trial; a trial that may go on to a later rung counts as pruned."""
    from optuna.trial import TrialState

    if trial.failure is not None or (trial.results and trial.value is None):
        return TrialState.FAIL
    if trial.value is None:
        return TrialState.RUNNING
    is_whole = len(trial.results) == rungs_of(config, trial.number)
    return TrialState.COMPLETE if is_whole else TrialState.PRUNED


def _distribution(dimension: Dimension) -> BaseDistribution:
    from optuna import distributions

    if dimension.choices:
        # Choices become texts: a choice may be a list, which Optuna does not take.
        return distributions.CategoricalDistribution(dimension.texts)
    if dimension.is_whole:
        return distributions.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.is_log)
    return distributions.FloatDistribution(dimension.low, dimension.high, log=dimension.is_log)


def _suggest(optuna_trial: OptunaTrial, dimension: Dimension) -> object:
    """Let Optuna choose a value of a dimension; a number that is not whole has 6 digits."""
    key, is_log = dimension.key, dimension.is_log
    if dimension.choices:
        text = optuna_trial.suggest_categorical(key, dimension.texts)
        return dimension.choices[dimension.texts.index(text)]
    if dimension.is_whole:
        return optuna_trial.suggest_int(key, int(dimension.low), int(dimension.high), log=is_log)
    exact = optuna_trial.suggest_float(key, dimension.low, dimension.high, log=is_log)
    # Rounding may have left the interval.
    return min(max(float(f"{exact:.6g}"), dimension.low), dimension.high)
