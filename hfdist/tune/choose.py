"""The objective of a run, from `task.*`."""

from __future__ import annotations

from collections.abc import Mapping

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
    """Make the objective of a run; None: it trains next tokens."""
    task = config.task
    match task.name:
        case TaskName.dpo | TaskName.cpo:
            if task.ref_model_sync_steps is not None:
                return FollowedPreferences(task)
            return Preferences(task, _table(config) if task.name.traits.has_reference else None)
        case TaskName.kto:
            return KahnemanTversky(task, _table(config))
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
            teacher = Teacher(task, layout=strategy, arguments=arguments)
            if task.teacher_top_k is not None:
                return Distillation(task, KeptTeacher(config.run.folder.teacher, teacher, task))
            lines = _lines(config, num_answers=1)
            return Distillation(
                task, teacher, StudentAnswers(config, tokenizer, lines=lines) if task.on_policy else None
            )
        case TaskName.grpo | TaskName.rloo | TaskName.ppo | TaskName.online_dpo:
            rollouts = Rollouts(
                config,
                _rewards(config, tokenizer, strategy, arguments),
                tokenizer,
                examples=_held_out_prompts(held_out, config),
                lines=_lines(config, num_answers=task.num_generations),
            )
            if task.name is TaskName.online_dpo:
                return OnlinePreferences(task, rollouts)
            return (ProximalPolicy if task.name is TaskName.ppo else PolicyGradient)(task, rollouts)
    return None


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
    """Raise a ConfigError on a reward that no package offers, or that runs programs where they cannot be confined."""
    made = {name: lambda generations: [0.0] * len(generations) for name in (REWARD_MODEL, ENVIRONMENT)}
    for reward in load_rewards(names, where="task.rewards", others=made):
        if reward.name in SANDBOXED:
            reward([Generation(prompt="", text="", reference="assert True")])


def _rewards(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, strategy: Strategy, arguments: TrainingArguments
) -> list[Reward]:
    path = config.task.reward_model
    made: dict[str, Score] = {ENVIRONMENT: lambda generations: [one.environment_reward for one in generations]}
    if path is not None:
        made[REWARD_MODEL] = LearnedReward(path, tokenizer, layout=strategy, arguments=arguments)
    return load_rewards(config.task.rewards, where="task.rewards", others=made)


def _lines(config: RunConfig, *, num_answers: int) -> RolloutLines:
    return RolloutLines(config.run.folder.rollouts, config.report.log_every, num_answers)


def _table(config: RunConfig) -> ReferenceTable:
    return ReferenceTable(config.run.folder.reference, plain([config.model, config.adapter.path, config.train.seed]))
