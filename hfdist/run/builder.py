"""A run from its config to its Trainer, in the steps that a recipe names."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta

from transformers import PrinterCallback, TrainerCallback, default_data_collator

from hfdist.collectives import world_size
from hfdist.config.checks.preflight import check_run
from hfdist.config.run import RunConfig
from hfdist.config.task import Head
from hfdist.control_group import ControlGroup
from hfdist.models import TrainableParameters, build_model, check_weights, fit_vocabulary
from hfdist.models.attention_choice import choose_attention
from hfdist.models.image_text import find_unreached
from hfdist.models.label_names import set_labels
from hfdist.models.peft_config import check_adapter
from hfdist.models.position_limit import most_positions
from hfdist.models.processor import list_processor_files
from hfdist.open_files import raise_limit
from hfdist.optim.registry import check_optimizer
from hfdist.processes.startup import reporting
from hfdist.run.data import build_data, count_max_steps
from hfdist.run.end_of_run import finish, stop
from hfdist.run.images import make_example
from hfdist.run.logs import set_up_logging
from hfdist.run.model import check_packing, find_model, save_memory, speed_up
from hfdist.run.options import make_options, optimizer_here, train_settings_here
from hfdist.run.own_plan import begin_plan, naming_lack_of_memory
from hfdist.run.parts import PARTS
from hfdist.run.parts.part import Joins
from hfdist.run.state import RunState
from hfdist.run.summary import tell_start
from hfdist.run.training_arguments import build_arguments, check_further_arguments
from hfdist.strategies.select import device_type_here, select_strategy
from hfdist.trainer.checkpointing.start import check_resume, find_start
from hfdist.trainer.trainer import Trainer
from hfdist.tune.acting import check_turns
from hfdist.tune.choose import check_special_tokens, make_objective
from hfdist.tune.fit_model import check_fits, fit_model
from hfdist.tune.learned_reward import check_positions
from hfdist.tune.student_answers import check_prompts
from hfdist.tune.teacher_check import check_teacher

_LONGEST_WAIT = timedelta(days=7)
"""The longest time that ranks with nothing left to do wait; a rank that dies ends the wait: its connection breaks."""


class Run(RunState):
    """Builds the Trainer of a run from its config, in named steps; each step needs the steps above it.

    Each step sets attributes. A recipe of your own may change them before the next step.

    Args:
        config: the run's config, checked, as `compose_config` gives it.

    Raises:
        ConfigError: see `check_run`; unknown names in `train.arguments`, `adapter` or `evaluate`.
    """

    def __init__(self, config: RunConfig) -> None:
        raise_limit()
        self.config = config
        self.parts = [part() for part in PARTS]
        self.topology, batch = check_run(config)
        if device_type_here() == "cpu":
            # gloo keeps a connection between each two ranks: many open files. NCCL connects only those that send.
            raise_limit(self.topology.world_size)
        check_further_arguments(config, batch)
        check_optimizer(config)
        for part in self.parts:
            part.check(config, self.topology)
        set_up_logging(self.topology)
        self._train = train_settings_here(config)
        self.strategy = select_strategy(
            config.strategy, self._train, topology=self.topology, batch=batch, device_type=device_type_here()
        )
        check_adapter(config.adapter, config.model, self.strategy)
        self._here = config
        """The config with folders of this machine in place of Hub ids and GGUF files; it is never saved."""

    @property
    def _head(self) -> Head:
        return self.config.task.name.traits.head

    @reporting("finding the model")
    def find_model(self) -> None:
        """Bring the model's config and its tokenizer to this machine: from the Hub, or converted from GGUF."""
        self._here, self.architecture, self._fetch_weights, self.why_together = find_model(self.config)

    @reporting("opening the data and counting its documents")
    def open_data(self) -> None:
        """Open the sources, the tokenizer, the training stream of this data rank, and the held-out set.

        Raises:
            ConfigError, DataError: sources that are missing, unreadable or too small; a tokenizer larger than the
                model's vocabulary, or without a token that the task needs; a teacher with another one; a reward model
                that cannot read the longest answer; a chat template that cannot write episodes; rows without prompts
                where prompts are answered.
            PartitionError: rows with images, and a type of model whose stages in a pipeline cannot read them.
        """
        self.data = build_data(self._here, self.topology, self.architecture)
        if self._head.gives_labels:
            set_labels(self.architecture, self.config.data.labels)
        check_special_tokens(self.config, self.data.tokenizer)
        if self.data.images is not None:
            self._fit_stream_to_images()
        fit_vocabulary(self.architecture, self.data.tokenizer, self._here.model)
        if self.data.images is not None:
            self._example = make_example(self._here, self.architecture, self.data.images)
        self._check_task()

    def _fit_stream_to_images(self) -> None:
        """Say which images the stream's batches tell of, and choose the attention anew: rows may stay apart now."""
        # Prompts take their images along, once for each answer, and answers are batches of their own.
        are_prompts = self.config.task.name.traits.is_reinforcement
        self.data.stream.needs_image = self.strategy.calls_alike and self.topology.data > 1 and not are_prompts
        self.data.stream.tells_images_by_row = self.topology.pipeline > 1 or are_prompts
        # The first choice was for packed rows.
        self.architecture._attn_implementation = None
        self.why_together = choose_attention(self._here, self.architecture, device_type_here())

    def _check_task(self) -> None:
        """Check what the task needs besides the model: a teacher, a reward model, an environment, prompts."""
        task = self.config.task
        if task.teacher is not None:
            length = self.config.data.sequence_length
            check_teacher(task, self.data.tokenizer, self.architecture, sequence_length=length)
        if task.reward_model is not None:
            longest = self.config.data.sequence_length + task.max_new_tokens
            check_positions(
                task.reward_model,
                self.data.tokenizer,
                # A prompt is cut to what the model can read.
                longest=min(longest, most_positions(self.architecture) or longest),
                max_new_tokens=task.max_new_tokens,
            )
        if task.environment is not None:
            check_turns(self._here, self.data.tokenizer, self.data.corpus, self.architecture)
        if task.on_policy:
            check_prompts(self.data.corpus)

    @reporting("opening the run's folder")
    def open_folder(self) -> None:
        """Open the run folder, and compare the config with that of an earlier checkpoint; check model and data before.

        Raises:
            ConfigError: a folder that cannot be written or that another run is using, or a repository to upload to
                that cannot be written.
            CheckpointError: `checkpoint.resume` and the folder's checkpoints contradict each other, or the config has
                a change that needs `checkpoint.allow_changes`.
        """
        check_resume(self.config)
        if self.topology.is_main:
            for part in self.parts:
                part.open(self)

    @reporting("fetching weights, and waiting for the other ranks")
    def start_ranks(self) -> None:
        """Download the weights and check their names, then make TrainingArguments, which start the process group."""
        self.own_plan = begin_plan(self._here, self.architecture, self.topology)
        # Before the process group exists: in it, the other ranks would wait for the download.
        self._fetch_weights()
        check_weights(self._here.model, self.architecture, TrainableParameters.of(self.config), head=self._head)
        max_steps = count_max_steps(self._here, self.data.corpus, self.data.tokenizer, self.data.images)
        self.arguments = build_arguments(replace(self.config, train=self._train), self.strategy, max_steps=max_steps)
        # A group needs all ranks, and from here on they are all here.
        self.patient = ControlGroup(_LONGEST_WAIT) if world_size() > 1 else None

    @reporting("making the model")
    def build_model(self) -> None:
        """Make the model, random or pretrained; after `start_ranks`, since ZeRO-3 partitions it in its constructor."""
        self.model = build_model(
            self._here.model,
            self.architecture,
            seed=self.config.train.seed,
            layout=self.strategy,
            trained=self._choose_trained(),
            head=self._head,
        )

    def _choose_trained(self) -> TrainableParameters:
        """Give the parameters that are trained, without those of modules that images never reach."""
        if self.data.images is None:
            return TrainableParameters.of(self.config)
        with self.strategy.without_partitioning(self.arguments):
            unreached = find_unreached(self.architecture, self._example.tensors)
        return TrainableParameters.of(self.config, unreached=unreached, example=self._example)

    @reporting("building the Trainer")
    def build_trainer(self) -> None:
        """Make the Trainer, with the callbacks of the parts."""
        config, arguments, model, data = self.config, self.arguments, self.model, self.data
        if data.images is None:
            # Where rows have images, a small model has packed them already.
            check_packing(model, data.stream.plan.packing, self.strategy, self._head)
        self.objective = make_objective(
            config, data.tokenizer, data.held_out, strategy=self.strategy, arguments=arguments
        )
        if self.objective is not None:
            if data.images is None:
                # Where rows have images, the small model has shown that, too.
                check_fits(model, self._head)
            fit_model(model, data.tokenizer, self._head)
        speed_up(config, model, self.strategy)
        # Before `make_options`: a part that makes its callbacks sets attributes of this run, which the options read.
        callbacks = self._callbacks(Joins.constructor)
        self.trainer = Trainer(
            model,
            arguments,
            strategy=self.strategy,
            train_dataset=data.stream,
            eval_dataset=data.held_out,
            processing_class=data.tokenizer,
            data_collator=default_data_collator if data.images is None else data.stream.stack_rows,
            callbacks=callbacks,
            optimizer_cls_and_kwargs=optimizer_here(config, warmup_steps=int(arguments.warmup_steps)),
            options=make_options(self, list_processor_files(self._here.model)),
        )
        save_memory(config, model)
        self._join(Joins.built)
        # The progress bar and metrics.jsonl say the same, and are easier to read.
        self.trainer.remove_callback(PrinterCallback)

    def train(self) -> None:
        """Log what is about to be done, train from the checkpoint that `checkpoint.resume` chooses, report and export.

        Raises:
            PreemptedError: a signal has stopped it, saved.
            BudgetError: it has stopped at a budget, saved, evaluated and exported.
            PeerError: the connection to another rank is lost.
            ResourceError: there is not enough memory; or the model is trained and saved, but could not be uploaded.
        """
        config, trainer = self.config, self.trainer
        with closing(self.usage), ExitStack() as until_the_end:
            for part in self.parts:
                until_the_end.enter_context(part.during(self))
            replicas = trainer.options.replicas
            self.start = find_start(config, replicas)
            tell_start(self)
            trainer.args.eval_on_start = bool(config.evaluate.at_start) and self.start.checkpoint is None
            first = "evaluating, then taking the first step" if trainer.args.eval_on_start else "taking the first step"
            with naming_lack_of_memory(self.plan), reporting(first) as self.first_step:
                self._join(Joins.training)
                trainer.train(resume_from_checkpoint=self.start.checkpoint)
            if replicas is not None:
                # All that a later start needs is on the disk.
                replicas.remove()
            if self.preemption.stopped_by is not None:
                try:
                    stop(self, self.parts)
                finally:
                    self.preemption.check(config.run.dir)
            # For a run without checkpoints; with checkpoints, the last save has written the ledger.
            trainer.checkpointer.data.write_ledger()
            finish(self, self.parts)
            self.budget.check()
        if self.not_uploaded is not None:
            raise self.not_uploaded

    def _callbacks(self, joins: Joins) -> list[TrainerCallback]:
        """Give the callbacks of the parts that join the Trainer at this point, in the order of `PARTS`."""
        return [callback for part in self.parts if part.joins is joins for callback in part.callbacks(self)]

    def _join(self, joins: Joins) -> None:
        for callback in self._callbacks(joins):
            self.trainer.add_callback(callback)
