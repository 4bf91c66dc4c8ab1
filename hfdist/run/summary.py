"""What a run says before it trains: layout, batch arithmetic, and the first sequences that it reads."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import cast

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfdist.checkpoint.folder import step_of
from hfdist.config.batch import BatchPlan
from hfdist.config.data import EXAMPLES, DataConfig, Packing, RowFormat
from hfdist.config.islands import IslandMethod, IslandsConfig
from hfdist.config.model import Init
from hfdist.config.override_text import in_shell
from hfdist.config.rates import explain_learning_rate
from hfdist.config.run import RunConfig
from hfdist.config.task import TaskConfig, TaskName
from hfdist.data import Corpus, TokenStream, are_alike, are_chats, are_judged_alike, are_silent
from hfdist.data.documents.token_reader import Documents, open_token_cache
from hfdist.data.marks import are_targets
from hfdist.data.order.records import Status
from hfdist.data.packing.sequence import IGNORED, INPUT_IDS, LABELS, POSITION_IDS
from hfdist.data.packing.sequence import Sequence as Packed
from hfdist.data.tokenization.encoders import Encoders
from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.errors import printable
from hfdist.optim.check import describe
from hfdist.optim.registry import make_small
from hfdist.optim.width import rate_factor
from hfdist.planning.describe import describe_shortly
from hfdist.run.state import RunState
from hfdist.trainer.checkpointing.start import Start
from hfdist.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

_OPEN, _SHUT = "\u27e6", "\u27e7"
_MOST_CHARACTERS = 600
_SURVEYED_DOCUMENTS = 256
_TURNS = {"instruction": "prompt", "output": "completion"}
"""Columns that become turns, in place of those that become plain text."""


def tell_start(run: RunState) -> None:
    """Log what a run is about to do."""
    config, data, done = run.config, run.data, _steps_done(run.start)
    logger.info("%s", _describe(run, done))
    if done or not run.trainer.is_world_process_zero():
        return
    if config.model.init is Init.pretrained and config.data.sources.keys() <= {*EXAMPLES}:
        logger.info("the data are an example of hfdist's; your own: data=FILE or data=FOLDER")
    if data.corpus.has_examples:
        a_step = run.strategy.batch.tokens_per_step
        logger.info(
            "of the data: %s", survey(data.corpus, data.tokenizer, config.data, config.task, a_step, data.images)
        )
        if (advice := advise(data.corpus, data.tokenizer, config)) is not None:
            logger.warning("%s", advice)
    for text in preview(data.stream, data.tokenizer, config.report.preview, config.task):
        logger.info("%s", text)


def _steps_done(start: Start) -> int:
    """Give the steps of the checkpoint from which the run goes on."""
    return 0 if start.checkpoint is None else max(step_of(Path(start.checkpoint).name), 0)


def _describe(run: RunState, steps_done: int) -> str:
    """Give the lines that a run starts with."""
    config, trainer = run.config, run.trainer
    strategy, engine = trainer.strategy, trainer.engine
    assert strategy is not None
    assert engine is not None
    batch, optimizer = strategy.batch, make_small(config.optimizer)
    model, size = cast(PreTrainedModel, engine.model), engine.size
    parts = f"{batch.data_size} x micro batches {batch.num_microbatches} x sequences {batch.micro_batch_size}"
    a_step, in_all = _describe_size(config.task, config.data.packing, batch, trainer.args.max_steps)
    what = f"{size.num_trained:,} parameters, {100 * size.num_trained / size.num_parameters:.3g} %"
    adapter = config.adapter.type or f"the adapter of {config.adapter.path}"
    what_of_batch = "prompts" if config.task.name.traits.is_reinforcement else "sequences"
    done = f", of which {steps_done:,} are done" if steps_done else ""
    rows = {
        "model": f"{model.config.model_type}, {size.num_parameters:,} parameters, "
        f"{config.model.init.value} weights, {engine.description}"
        + (f"; packed documents not one by one, since {run.why_together}" if run.why_together else ""),
        "trained": f"{what} of all" + (f": {adapter}" if config.adapter.is_used else ""),
        "layout": f"{strategy.topology.describe()}; sharding {config.strategy.sharding.value}; "
        f"{config.train.precision.value}",
        "islands": _describe_islands(config.islands),
        "plan": "" if run.plan is None else describe_shortly(run.plan),
        "batch": f"{batch.global_batch_size:,} {what_of_batch} = data ranks {parts}; {a_step}",
        "data": run.data.describe(config.task.name.traits.unit),
        "train": f"{trainer.args.max_steps:,} steps{done}, {in_all}; {describe(optimizer)}, "
        f"lr {config.optimizer.lr:g}{explain_learning_rate(config)} {config.optimizer.schedule.value}"
        f"{_describe_width(config, model)}",
        "folder": config.run.dir,
    }
    return "\n".join(f"  {label:<9} {text}" for label, text in rows.items() if text)


def _describe_size(task: TaskConfig, packing: Packing, batch: BatchPlan, max_steps: int) -> tuple[str, str]:
    """Say what a step and the whole run train on."""
    if task.name.traits.is_reinforcement:
        # How long answers are, nobody knows before.
        answers = f"{task.num_generations:,} answers to each, of at most {task.max_new_tokens:,} tokens"
        answers += "" if task.trained_prompts is None else f"; {task.trained_prompts:,} of the prompts train"
        return answers, f"{max_steps * batch.global_batch_size:,} prompts"
    # Examples that stay whole leave some of a sequence empty.
    up_to = "" if packing is Packing.concat else "up to "
    return f"{up_to}{batch.tokens_per_step:,} tokens a step", f"{up_to}{max_steps * batch.tokens_per_step:,} tokens"


def _describe_width(config: RunConfig, model: PreTrainedModel) -> str:
    base_width = config.optimizer.base_width
    if base_width is None:
        return ""
    return f", of width {base_width:,}: times {rate_factor(model.config, base_width):.3g} for hidden matrices"


def _describe_islands(islands: IslandsConfig) -> str:
    if not islands.is_used:
        return ""
    where = f"{islands.index} of {islands.count}"
    if islands.method is IslandMethod.parameter_server:
        waits = {None: "asynchronous", 0: "synchronous"}.get(islands.staleness, f"staleness {islands.staleness}")
        return f"{where}; parameter server, {waits}; {islands.codec.value}"
    outer = f"outer lr {islands.outer_lr:g}, momentum {islands.outer_momentum:g}"
    return f"{where}; rounds of {islands.every:,} steps; {outer}; {islands.codec.value}"


def describe_kernels(trainer: Trainer) -> str:
    """Say in one line what computes attention and the loss, and how ranks share parameters."""
    assert trainer.engine is not None
    head = trainer.options.loss_head
    return f"{trainer.engine.description}; loss {'of all logits' if head is None else head.description}"


def preview(stream: TokenStream, tokenizer: PreTrainedTokenizerBase, count: int, task: TaskConfig) -> Iterator[str]:
    """Show the next sequences of a stream, decoded from what the model gets; the stream stays where it is."""
    for number, (_, _, sequence) in enumerate(islice(stream.packed(0, 1), count), 1):
        num_targets = int((sequence.rows[LABELS] != IGNORED).sum())
        share = 100 * num_targets / max(sequence.num_tokens, 1)
        what = _marked(task)
        head = f"sequence {number}: {sequence.num_tokens:,} tokens, {num_targets:,} of them {what} ({share:.1f} %)"
        yield f"{head}, between {_OPEN} and {_SHUT}\n{_show(sequence, tokenizer, task)}"


def _marked(task: TaskConfig) -> str:
    """Name the tokens that an example marks as its answer: with rewards they are compared, and not learned."""
    return "of the reference" if task.name.traits.is_reinforcement else "targets"


_NAMES = (("chosen", "rejected"), ("query", "text"))
"""What documents are called, by whether they are embedded, and whether they are marked."""


def _show(sequence: Packed, tokenizer: PreTrainedTokenizerBase, task: TaskConfig) -> str:
    lines = []
    rows = sequence.rows[:, : sequence.num_tokens]
    starts = [*np.flatnonzero(rows[POSITION_IDS] == 0).tolist(), rows.shape[1]]
    for start, stop in pairwise(starts):
        labels = rows[LABELS, start:stop]
        ids, is_target, is_rejected = rows[INPUT_IDS, start:stop], labels != IGNORED, (labels < IGNORED).any()
        edges = [0, *(np.flatnonzero(np.diff(is_target)) + 1).tolist(), stop - start]
        shown, before = "", ""
        for first, end in pairwise(edges):
            # From the beginning each time: some tokenizers write a piece by itself without the space before it.
            text = str(tokenizer.decode(ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False))
            piece = _safe(text[len(before) :])
            shown += f"{_OPEN}{piece}{_SHUT}" if is_target[first] else piece
            before = text
        told = (
            "" if task.name.traits.row_format is None else f"{_NAMES[task.name is TaskName.embed][int(is_rejected)]}: "
        )
        lines.append(f"  {told}{shown}".replace("\n", "\n  "))
    return "\n  --\n".join(lines)


def _safe(text: str) -> str:
    """Remove control characters, so that data cannot write to the terminal; of a long text, leave out the middle."""
    safe = "\n".join(map(printable, text.split("\n")))
    if len(safe) <= _MOST_CHARACTERS:
        return safe
    half = _MOST_CHARACTERS // 2
    return f"{safe[:half]} [{len(safe) - 2 * half:,} characters] {safe[-half:]}"


def survey(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    task: TaskConfig,
    tokens_per_step: int = 0,
    images: ImageTokens | None = None,
) -> str:
    """Say what becomes of some examples: their length, the share of targets, and how many are cut or left out.

    Also that a step reads all of them several times, if it does; 0 tokens a step: not known.
    """
    documents = Documents(corpus, Encoders.of(tokenizer, config, images), open_token_cache(config), config)
    read = (chunk for block in corpus.mixed_blocks() for chunk in documents.chunks(np.array(block)))
    rows = (row for chunk in read for row in zip(chunk.views(), chunk.fates, chunk.cut_tokens, strict=True))
    found = list(islice(rows, _SURVEYED_DOCUMENTS))
    trained = [(tokens, cut_tokens) for tokens, fate, cut_tokens in found if fate == Status.trained]
    num_tokens = sum(len(tokens) for tokens, _ in trained)
    share = 100 * sum(int(are_targets(tokens).sum()) for tokens, _ in trained) / max(num_tokens, 1)
    fates = Counter(int(fate) for _, fate, _ in found)
    notes = [
        (sum(int(cut_tokens > 0) for _, cut_tokens in trained), f"cut to {config.sequence_length:,} tokens"),
        (fates[Status.too_long], "left out as too long"),
        (fates[Status.no_target], "left out without a target"),
        (fates[Status.bad], "left out as bad"),
    ]
    told = "".join(f"; {count} {what}" for count, what in notes if count)
    mean = num_tokens / max(len(trained), 1)
    times = tokens_per_step / max(num_tokens * corpus.num_documents / max(len(found), 1), 1)
    if times > 1 and config.packing is not Packing.none:
        told += f"; a step of {tokens_per_step:,} tokens reads all of them {times:,.1f} times (train.global_batch_size)"
    return f"{len(found)} examples: {mean:,.1f} tokens on average, {share:.1f} % of them {_marked(task)}{told}"


def advise(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> str | None:
    """Say what a user may not have meant: equal pairs, empty answers, chats as plain text; None: nothing."""
    if are_alike(corpus):
        return "chosen and rejected are the same in each of the first pairs: they tell nothing apart"
    if config.task.name is TaskName.kto and are_judged_alike(corpus):
        return "the label is the same in each of the first rows: kto learns from answers that were liked and others"
    if are_silent(corpus):
        return "the answers in each of the first chats are empty: only their end is learned"
    if config.model.init is not Init.pretrained or tokenizer.chat_template is None or are_chats(corpus) is not False:
        return None
    data, hint = config.data, "rows whose prompt and answers are lists of messages"
    is_found = data.format is RowFormat.auto and not any(one.columns or one.format for one in data.sources.values())
    if config.task.name is TaskName.causal_lm and is_found:
        names = {ours: data.columns.get(theirs, theirs) for ours, theirs in _TURNS.items()}
        hint = in_shell("data.columns", dict(names))
    return f"prompts and answers are learned as plain text, without the model's chat template; turns of a chat: {hint}"
