"""Which objective a run trains, by `task.name`, and whether the tokenizer and the rewards fit it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase, TrainingArguments

from hfdist.config.plain_values import plain
from hfdist.config.run import RunConfig
from hfdist.config.task import ENVIRONMENT, REWARD_MODEL, TaskName
from hfdist.data.documents.examples import Example, take_examples
from hfdist.rewards import Generation, Reward, load_rewards
from hfdist.rewards.code import SANDBOXED
from hfdist.rewards.registry import Score
from hfdist.strategies.base import Strategy
from hfdist.trainer.step.objective import Objective
from hfdist.tune.classify import Classification, TokenClassification
from hfdist.tune.distill import Distillation
from hfdist.tune.embed import Embeddings
from hfdist.tune.kept_teacher import KeptTeacher
from hfdist.tune.learned_reward import LearnedReward
from hfdist.tune.masked import MaskedTokens, check_mask_token
from hfdist.tune.moving_reference import FollowedPreferences
from hfdist.tune.online_preference import OnlinePreferences
from hfdist.tune.policy import PolicyGradient
from hfdist.tune.ppo import ProximalPolicy
from hfdist.tune.preference import Preferences
from hfdist.tune.reference import ReferenceTable
from hfdist.tune.rerank import Ranking
from hfdist.tune.reward import RewardPairs
from hfdist.tune.rollout import Rollouts
from hfdist.tune.rollout_lines import RolloutLines
from hfdist.tune.seq2seq import SequenceToSequence
from hfdist.tune.span_corruption import SpanCorruption, find_sentinels
from hfdist.tune.student_answers import StudentAnswers
from hfdist.tune.teacher import Teacher
from hfdist.tune.unpaired import KahnemanTversky


def make_objective(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    held_out: object,
    *,
    strategy: Strategy,
    arguments: TrainingArguments,
) -> Objective | None:
    """Make the objective of a run.

    Args:
        config: config of the run.
        tokenizer: tokenizer of the model.
        held_out: the held-out rows, from which prompts of evaluations are taken; None: there are none.
        strategy: layout in which the model is trained; frozen models are sharded by it.
        arguments: the Trainer's arguments.

    Returns:
        The objective; None: the run trains next tokens.
    """
    task = config.task
    match task.name:
        case TaskName.dpo | TaskName.cpo:
            if task.ref_model_sync_steps is not None:
                return FollowedPreferences(task)
            return Preferences(task, _reference_table(config) if task.name.traits.has_reference else None)
        case TaskName.kto:
            return KahnemanTversky(task, _reference_table(config))
        case TaskName.reward:
            return RewardPairs()
        case TaskName.embed:
            return Embeddings(task, config.data.texts, tokenizer)
        case TaskName.classify:
            return Classification(tokenizer, config.data.labels)
        case TaskName.token_classify:
            return TokenClassification(tokenizer, config.data.labels)
        case TaskName.rerank:
            return Ranking(tokenizer, task)
        case TaskName.seq2seq:
            return SequenceToSequence()
        case TaskName.mlm:
            return MaskedTokens(task, config.train.seed, tokenizer)
        case TaskName.span_corruption:
            return SpanCorruption(task, config.train.seed, tokenizer, config.data.sequence_length)
        case TaskName.distill:
            return _distillation(config, tokenizer, Teacher(task, layout=strategy, arguments=arguments))
        case TaskName.grpo | TaskName.rloo | TaskName.ppo | TaskName.online_dpo:
            rollouts = Rollouts(
                config,
                _rewards(config, tokenizer, strategy, arguments),
                tokenizer,
                examples=_held_out_prompts(held_out, config),
                lines=_rollout_lines(config, num_answers=task.num_generations),
            )
            return _learning_from_answers(config, rollouts)
    return None


def _distillation(config: RunConfig, tokenizer: PreTrainedTokenizerBase, teacher: Teacher) -> Distillation:
    task = config.task
    if task.teacher_top_k is not None:
        return Distillation(task, KeptTeacher(config.run.folder.teacher, teacher, task))
    if not task.on_policy:
        return Distillation(task, teacher)
    lines = _rollout_lines(config, num_answers=1)
    return Distillation(task, teacher, StudentAnswers(config, tokenizer, lines=lines))


def _learning_from_answers(config: RunConfig, rollouts: Rollouts) -> Objective:
    """Make an objective in which the model learns from rewards of its own answers."""
    match config.task.name:
        case TaskName.online_dpo:
            return OnlinePreferences(config.task, rollouts)
        case TaskName.ppo:
            return ProximalPolicy(config.task, rollouts)
        case _:
            return PolicyGradient(config.task, rollouts)


def _held_out_prompts(held_out: object, config: RunConfig) -> list[Example]:
    if held_out is None:
        return []
    return take_examples(held_out, config.evaluate.num_generations, with_images=config.task.name.traits.reads_images)


def check_special_tokens(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a ConfigError if the tokenizer lacks a token that the task needs."""
    if config.task.name is TaskName.mlm:
        check_mask_token(tokenizer)
    if config.task.name is TaskName.span_corruption:
        find_sentinels(tokenizer, config.task, config.data.sequence_length)


def check_rewards(names: Mapping[str, float]) -> None:
    """Check the rewards of a run before it begins.

    Args:
        names: the weight of each reward, by the name of the reward.

    Raises:
        ConfigError: no package offers a reward, or a reward runs programs and this machine cannot confine them.
    """
    # These two come from the run itself: here only their names count.
    from_run = dict.fromkeys((REWARD_MODEL, ENVIRONMENT), _score_nothing)
    for reward in load_rewards(names, where="task.rewards", others=from_run):
        if reward.name in SANDBOXED:
            # A program that does nothing: the sandbox raises the error if it cannot start.
            reward([Generation(prompt="", text="", reference="assert True")])


def _score_nothing(generations: Sequence[Generation]) -> list[float]:
    return [0.0] * len(generations)


def _rewards(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, strategy: Strategy, arguments: TrainingArguments
) -> list[Reward]:
    """Load the rewards of the run; the environment and the reward model give theirs through functions made here."""
    path = config.task.reward_model
    from_run: dict[str, Score] = {ENVIRONMENT: lambda generations: [one.environment_reward for one in generations]}
    if path is not None:
        from_run[REWARD_MODEL] = LearnedReward(path, tokenizer, layout=strategy, arguments=arguments)
    return load_rewards(config.task.rewards, where="task.rewards", others=from_run)


def _rollout_lines(config: RunConfig, *, num_answers: int) -> RolloutLines:
    return RolloutLines(config.run.folder.rollouts, config.report.log_every, num_answers)


def _reference_table(config: RunConfig) -> ReferenceTable:
    # What the weights before the first step follow from: the log-probabilities of another reference do not count.
    reference = plain([config.model, config.adapter.path, config.train.seed])
    return ReferenceTable(config.run.folder.reference, reference)
