"""Which values a trial gets, and which trial goes on: functions of what the trials have reached."""

import math

import pytest

from hfdist.config.override_text import COMMAND_LINE
from hfdist.config.sweep import Sampler, compose_sweep
from hfdist.errors import ConfigError
from hfdist.records.trials import Result, Trial, rank_trials
from hfdist.tools.sweep.halving import bracket_of, next_promotion, rungs_of, tokens_of_rungs
from hfdist.tools.sweep.sampling import choose_values, importances, write_study
from hfdist.tools.sweep.space import Space, parse_dimension

LR = parse_dimension("optimizer.lr", "tag(log, interval(1e-4, 1))", COMMAND_LINE)
NAME = parse_dimension("optimizer.name", "adamw,sgd", COMMAND_LINE)
MOMENTUM = parse_dimension("optimizer.weight_decay", "interval(0.1, 0.9) if optimizer.name=sgd", COMMAND_LINE)
SPACE = Space([LR, NAME, MOMENTUM])


def search(config, loss, number):
    trials = []
    for _ in range(number):
        values = choose_values(config, SPACE, trials)
        value = loss(values)
        result = Result(step=1, tokens=100, value=value)
        trials.append(Trial(number=len(trials), values=values, results=[result]))
    return trials


def loss(values):
    """Best for sgd with a rate of 0.03 and a momentum of 0.8."""
    other = 1.0 if values["optimizer.name"] == "adamw" else abs(values["optimizer.weight_decay"] - 0.8)
    return abs(math.log10(values["optimizer.lr"] / 0.03)) + other


@pytest.mark.parametrize("name", ["random", "tpe"])
def test_values_are_a_function_of_seed_number_and_results(name):
    config = compose_sweep(name, ["sweep.trials=20"], None)
    trials = search(config, loss, 12)
    assert [trial.values for trial in search(config, loss, 12)] == [trial.values for trial in trials]
    assert len({trial.values["optimizer.lr"] for trial in trials}) == 12
    other = search(compose_sweep(name, ["sweep.trials=20", "sweep.seed=1"], None), loss, 12)
    assert not {trial.values["optimizer.lr"] for trial in other} & {trial.values["optimizer.lr"] for trial in trials}
    for trial in trials:
        assert 1e-4 <= trial.values["optimizer.lr"] <= 1
        assert ("optimizer.weight_decay" in trial.values) == (trial.values["optimizer.name"] == "sgd")


def test_tpe_finds_what_random_values_do_not():
    def best(name, seed):
        config = compose_sweep(name, ["sweep.trials=30", f"sweep.seed={seed}"], None)
        return min(loss(trial.values) for trial in search(config, loss, 30))

    tpe, random = (sorted(best(name, seed) for seed in range(5))[2] for name in ("tpe", "random"))
    assert tpe < random / 2


def test_trials_that_run_failed_or_stopped_are_known_to_tpe():
    config = compose_sweep("asha", [], None)
    trials = search(config, loss, 8)
    trials[1].results.clear()
    trials[2].failure = "the loss is not finite"
    trials[3].results[:] = [Result(step=1, tokens=100, value=None)]
    trials[4].results += [Result(step=3, tokens=300, value=0.1), Result(step=9, tokens=900, value=0.1)]
    assert config.sampler is Sampler.tpe
    assert choose_values(config, SPACE, trials).keys() >= {"optimizer.lr", "optimizer.name"}


def test_optuna_s_own_tools_read_the_study(tmp_path):
    import optuna

    config = compose_sweep("random", ["sweep.trials=20"], None)
    space = Space([LR, NAME])
    trials = []
    for _ in range(20):
        values = choose_values(config, space, trials)
        value = abs(math.log10(values["optimizer.lr"] / 0.03))
        trials.append(Trial(number=len(trials), values=values, results=[Result(step=1, tokens=100, value=value)]))
    trials[3].failure, trials[3].results = "killed", []
    for _ in range(2):
        write_study(config, space, trials, tmp_path / "mine/study.journal")
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(tmp_path / "mine/study.journal"))
    )
    study = optuna.load_study(study_name="mine", storage=storage)
    assert len(study.trials) == 20
    assert study.best_value == min(trial.value for trial in trials if trial.value is not None)
    assert study.best_params["optimizer.name"] in ("adamw", "sgd")
    shares = importances(config, space, trials)
    assert next(iter(shares)) == "optimizer.lr"
    assert shares["optimizer.lr"] > 0.8
    assert importances(config, space, trials[:5]) == {}


def asha(values):
    """Trials, each with its value at the end of each rung so far."""
    return [
        Trial(
            number=number,
            values={},
            results=[Result(step=rung, tokens=rung, value=value) for rung, value in enumerate(own)],
        )
        for number, own in enumerate(values)
    ]


def test_the_best_third_goes_on():
    config = compose_sweep("asha", [], None)
    assert tokens_of_rungs(config, 0, 900) == [100, 300, 900]
    assert next_promotion(config, asha([[3.0], [2.0]]), []) is None
    three = asha([[3.0], [2.0], [4.0]])
    assert next_promotion(config, three, []).number == 1
    assert next_promotion(config, three, [1]) is None
    assert next_promotion(config, asha([[3.0], [2.0, 1.0], [4.0]]), []) is None
    # Of nine the best three; and of three that have come further the best one, first.
    nine = [[3.0], [2.0, 1.5], [4.0], [5.0], [6.0], [1.0, 1.2], [7.0], [8.0], [2.5]]
    assert next_promotion(config, asha(nine), []).number == 8
    nine[8] = [2.5, 2.4]
    assert next_promotion(config, asha(nine), []).number == 5
    failed = asha(nine)
    failed[5].failure = "killed"
    assert next_promotion(config, failed, []) is None
    maximize = compose_sweep("asha", ["sweep.direction=maximize"], None)
    assert next_promotion(maximize, three, []).number == 2


def test_hyperband_s_brackets_begin_at_later_rungs_and_stay_among_themselves():
    config = compose_sweep("hyperband", [], None)
    brackets = [bracket_of(config, number) for number in range(34)]
    assert brackets == ([0] * 9 + [1] * 5 + [2] * 3) * 2
    assert tokens_of_rungs(config, 9, 900) == [300, 900]
    assert (tokens_of_rungs(config, 16, 900), rungs_of(config, 16)) == ([900], 1)
    # The best of bracket 0 goes on, however good those of the others are.
    trials = asha([[3.0], [2.0], [4.0], *[[5.0]] * 6, [0.1], [0.2], [0.3], [0.4], [0.5], [0.0]])
    trials[9].results += trials[9].results
    assert next_promotion(config, trials, []).number == 1
    assert next_promotion(config, trials, [1]).number == 0
    with pytest.raises(ConfigError, match="more brackets than rungs"):
        compose_sweep("hyperband", ["sweep.brackets=4"], None)


def test_the_furthest_are_ranked_first():
    trials = asha([[3.0], [2.0, 9.0], [None], [1.0], [2.0, 8.0, 7.0]])
    assert [trial.number for trial in rank_trials(trials, sign=1, has_lengths=True)] == [4, 1, 3, 0, 2]
    assert [trial.number for trial in rank_trials(trials, sign=-1, has_lengths=True)] == [4, 1, 0, 3, 2]
    best_first = rank_trials(trials, sign=1, has_lengths=False)
    assert [trial.number for trial in best_first] == [3, 0, 4, 1, 2], "a larger batch reads more, and is no further"
