"""A run from its config to its Trainer, in the steps that a recipe names."""

from __future__ import annotations

import atexit
import logging
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from threading import Event
from typing import Any

from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)

from hfdist.checkpoint import Keep
from hfdist.collectives import on_rank_zero
from hfdist.config.checks.preflight import check_run
from hfdist.config.composition.compose import to_values, to_yaml
from hfdist.config.data import cache_dir
from hfdist.config.islands import IslandMethod
from hfdist.config.run import RunConfig
from hfdist.config.task import TaskName
from hfdist.islands.parameter_client import GradientRecorder
from hfdist.islands.parameter_store import find_slots
from hfdist.models import TrainableParameters, build_model, check_weights, fit_vocabulary
from hfdist.models.adapter import check_adapter
from hfdist.models.loss import choose_loss
from hfdist.open_files import raise_limit
from hfdist.optim.registry import ClassAndSettings, check_optimizer, find_optimizer
from hfdist.planning.machines import STEPS
from hfdist.planning.plan import Plan
from hfdist.processes.startup import reporting
from hfdist.records import RunRecorder
from hfdist.records.lines import set_aside
from hfdist.strategies.base import Strategy
from hfdist.strategies.select import device_type_here, select_strategy
from hfdist.topology import Topology
from hfdist.trainer.budget.budget import Budget
from hfdist.trainer.budget.usage import Usage
from hfdist.trainer.checkpointing.start import check_resume, find_start, open_replicas
from hfdist.trainer.evaluation.evaluators import check_named, make_evaluators
from hfdist.trainer.evaluation.loop import Measure
from hfdist.trainer.export.push_to_hub import check_push
from hfdist.trainer.fault_tolerance.nonfinite_steps import Limits
from hfdist.trainer.fault_tolerance.rank_flags import Preemption
from hfdist.trainer.islands import ServerOptimizer
from hfdist.trainer.objectives.base import Objective
from hfdist.trainer.objectives.choose import check_rewards, fit_model, make_objective
from hfdist.trainer.optimizer_changes import OptimizerChanges
from hfdist.trainer.reporting.alerts import Alerts
from hfdist.trainer.reporting.callbacks import MetricsWriter, ProgressBar, TimelineDrawer
from hfdist.trainer.reporting.logs import set_up_logging
from hfdist.trainer.reporting.plan_grader import PlanGrader
from hfdist.trainer.reporting.rank_times import RankTimes
from hfdist.trainer.reporting.record_writer import RecordWriter
from hfdist.trainer.reporting.trackers import Trackers, ending_trackers
from hfdist.trainer.reporting.traffic import Traffic
from hfdist.trainer.run.end_of_run import finish
from hfdist.trainer.run.own_plan import OwnPlan, begin_plan, naming_lack_of_memory, runtime_bytes, take_plan
from hfdist.trainer.run.run_data import RunData, build_data, count_max_steps, writing
from hfdist.trainer.run.run_lock import RunLock
from hfdist.trainer.run.run_model import check_packing, find_model, save_memory, speed_up
from hfdist.trainer.run.summary import advise, describe_run, preview, survey
from hfdist.trainer.run.training_arguments import build_arguments, check_further_arguments
from hfdist.trainer.trainer import RunOptions, Trainer
from hfdist.watch.callback import Watch
from hfdist.watch.diagnosis import SAVING

logger = logging.getLogger(__name__)

_UNCLIPPED = 1e30
"""A norm that no finite gradient reaches."""


class Run:
    """Builds the Trainer of a run from its config, in named steps; each step needs the steps above it.

    Each step sets attributes. A recipe of your own may change them before the next step.

    Args:
        config: checked, as `compose_config` gives it.

    Raises:
        ConfigError: see `check_run`; unknown names in `train.arguments`, `adapter` or `evaluate`.
    """

    topology: Topology
    strategy: Strategy
    architecture: PreTrainedConfig
    data: RunData
    arguments: TrainingArguments
    model: PreTrainedModel
    trainer: Trainer
    plan: Plan | None = None
    """On rank 0, once the Trainer is built."""

    def __init__(self, config: RunConfig) -> None:
        raise_limit()
        self.config = config
        self.topology, batch = check_run(config)
        check_further_arguments(config, batch)
        check_optimizer(config)
        check_named(config, self.topology)
        check_rewards(config.task.rewards)
        set_up_logging(self.topology)
        self._train = config.train
        if config.islands.method is IslandMethod.parameter_server:
            find_slots(config.optimizer)
            # The server clips, by the norm of all islands' gradients.
            self._train = replace(config.train, max_grad_norm=_UNCLIPPED)
        self.strategy = select_strategy(
            config.strategy, self._train, topology=self.topology, batch=batch, device_type=device_type_here()
        )
        check_adapter(config.adapter, config.model, self.strategy)
        self._here = config
        """The config with folders of this machine in place of Hub ids and GGUF files; it is never saved."""
        self._recorder: RunRecorder | None = None
        """On rank 0, once the folder is open."""
        self._own_plan: OwnPlan | None = None

    @property
    def _scores(self) -> bool:
        return self.config.task.name is TaskName.reward

    @reporting("finding the model")
    def find_model(self) -> None:
        """Bring the model's config and its tokenizer to this machine: from the Hub, or converted from GGUF."""
        self._here, self.architecture, self._fetch_weights = find_model(self.config)

    @reporting("opening the data and counting its documents")
    def open_data(self) -> None:
        """Open the sources, the tokenizer, the training stream of this data rank, and the held-out set.

        Raises:
            ConfigError, DataError: sources that are missing, unreadable or too small; a tokenizer larger than the
                model's vocabulary.
        """
        self.data = build_data(self._here, self.topology)
        fit_vocabulary(self.architecture, self.data.tokenizer, self._here.model)

    @reporting("opening the run's folder")
    def open_folder(self) -> None:
        """Open the run folder, and compare the config with that of an earlier checkpoint; check model and data before.

        Raises:
            ConfigError: a folder that cannot be written or that another run is using, or a repository to upload to
                that cannot be written.
            CheckpointError: `checkpoint.resume` and the folder's checkpoints contradict each other, or the config has
                a change that needs `checkpoint.allow_changes`.
        """
        config, folder = self.config, self.config.run.folder.path
        check_resume(config)
        if self.topology.is_main:
            with writing("run.dir", config.run.dir):
                folder.mkdir(parents=True, exist_ok=True)
                # The process holds the lock until it ends, for whatever reason.
                atexit.register(RunLock(folder).release)
            layout = self.topology.degrees | {"sharding": config.strategy.sharding.value}
            self._recorder = RunRecorder(folder, layout, self.topology.world_size)
            check_push(config.export)

    @reporting("fetching weights, and waiting for the other ranks")
    def start_ranks(self) -> None:
        """Download the weights and check their names, then make TrainingArguments, which start the process group."""
        self._own_plan = begin_plan(self._here, self.architecture, self.topology)
        # Before the process group exists: in it, the other ranks would wait for the download.
        self._fetch_weights()
        check_weights(self._here.model, self.architecture, TrainableParameters.of(self.config), scores=self._scores)
        max_steps = count_max_steps(self._here, self.data.corpus, self.data.tokenizer)
        self.arguments = build_arguments(replace(self.config, train=self._train), self.strategy, max_steps=max_steps)

    @reporting("making the model")
    def build_model(self) -> None:
        """Make the model, random or pretrained; after `start_ranks`, since ZeRO-3 partitions it in its constructor."""
        self.model = build_model(
            self._here.model,
            self.architecture,
            seed=self.config.train.seed,
            layout=self.strategy,
            trained=TrainableParameters.of(self.config),
            scores=self._scores,
        )

    @reporting("building the Trainer")
    def build_trainer(self) -> None:
        """Make the Trainer, and log what it is about to do."""
        config, arguments, model, data = self.config, self.arguments, self.model, self.data
        folder = config.run.folder
        check_packing(model, data.stream, self.strategy)
        objective = make_objective(config, data.tokenizer, data.held_out, strategy=self.strategy, arguments=arguments)
        if objective is not None:
            fit_model(model, data.tokenizer)
        speed_up(config, model, self.strategy)
        measures, evaluators = make_evaluators(
            config, data.held_out, model=model, tokenizer=data.tokenizer, arguments=arguments, topology=self.topology
        )
        if objective is not None:
            evaluators = [*evaluators, *objective.callbacks()]
        bar = [ProgressBar()] if config.report.progress else []
        self._usage = Usage(self._recorder, config.cost, arguments.device)
        # They report on rank 0, but one or another on the first rank of each machine.
        trackers = [Trackers(config)] if config.report.to and arguments.local_process_index == 0 else []
        trainer = Trainer(
            model,
            arguments,
            strategy=self.strategy,
            train_dataset=data.stream,
            eval_dataset=data.held_out,
            processing_class=data.tokenizer,
            data_collator=default_data_collator,
            callbacks=[*trackers, MetricsWriter(folder.metrics), *bar, *evaluators, self._usage],
            optimizer_cls_and_kwargs=self._find_optimizer(),
            options=self._make_options(measures, objective),
        )
        save_memory(config, model)
        runtime = runtime_bytes(trainer.engine, arguments.device) if config.report.plan else None
        if self._own_plan is not None:
            self.plan = take_plan(self._own_plan, config, runtime_bytes=runtime, max_steps=arguments.max_steps)
        logger.info("%s", describe_run(config, trainer, data=data.describe(), plan=self.plan))
        if trainer.is_world_process_zero():
            if data.corpus.has_examples:
                a_step = self.strategy.batch.tokens_per_step
                logger.info("of the data: %s", survey(data.corpus, data.tokenizer, config.data, config.task, a_step))
                if (advice := advise(data.corpus, data.tokenizer, config)) is not None:
                    logger.warning("%s", advice)
            for text in preview(data.stream, data.tokenizer, config.report.preview, config.task):
                logger.info("%s", text)
        if config.optimizer.changes:
            trainer.add_callback(OptimizerChanges(config.optimizer))
        _add_reports(trainer, config, self._recorder)
        if config.report.plan:
            trainer.add_callback(self._make_grader(trainer, runtime))
        self.trainer = trainer

    def _find_optimizer(self) -> ClassAndSettings:
        config = self.config
        if config.islands.method is IslandMethod.parameter_server:
            return GradientRecorder, {"lr": config.optimizer.lr}
        return find_optimizer(config.optimizer, warmup_steps=int(self.arguments.warmup_steps))

    def _make_options(self, measures: Sequence[Measure], objective: Objective | None) -> RunOptions:
        config, checkpoint, train = self.config, self.config.checkpoint, self.config.train
        return RunOptions(
            run_values=to_values(config),
            keep=Keep(newest=checkpoint.keep, every=checkpoint.keep_every, best=checkpoint.keep_best),
            replicas=open_replicas(config),
            replicate_every=checkpoint.replicate_every,
            save_in_background=checkpoint.background,
            objective=objective,
            loss_head=None if self._scores else choose_loss(config, self.model, self.strategy),
            base_width=config.optimizer.base_width,
            limits=Limits(
                skipped_steps=train.max_skipped_steps,
                rollbacks=train.max_rollbacks,
                compare_replicas_every=train.compare_replicas_every,
            ),
            measures=measures,
            figures=self._usage.figures,
            islands=config.islands if config.islands.is_used else None,
            server_optimizer=ServerOptimizer(config=config.optimizer, max_grad_norm=train.max_grad_norm),
        )

    def _make_grader(self, trainer: Trainer, runtime: int | None) -> PlanGrader:
        assert trainer.engine is not None
        return PlanGrader(
            self.plan,
            self.config.run.folder,
            trainer.engine,
            runtime_bytes=runtime,
            recorder=self._recorder,
            steps=cache_dir(self.config.data) / STEPS,
        )

    def train(self) -> None:
        """Train from the checkpoint that `checkpoint.resume` chooses to the end, then report and export.

        Raises:
            PreemptedError: a signal has stopped it, saved.
            BudgetError: it has stopped at a budget, saved, evaluated and exported.
            PeerError: the connection to another rank is lost.
            ResourceError: there is not enough memory; or the model is trained and saved, but could not be uploaded.
        """
        config, trainer = self.config, self.trainer
        watching = Watch(config.run.dir, config.watch.heartbeat_seconds)
        with closing(self._usage), ending_trackers(trainer), watching as watch:
            preemption = Preemption()
            # Without checkpoints, a run that is stopped saves nothing.
            if config.checkpoint.every is not None:
                trainer.add_callback(preemption)
            budget = self._make_budget()
            trainer.add_callback(budget)
            # After the callback above, which decides what follows a step.
            trainer.add_callback(watch)
            replicas = trainer.options.replicas
            start = find_start(config, replicas)
            trainer.add_callback(RecordWriter(self._recorder, start))
            if not start.goes_on:
                # Of another run in this folder.
                on_rank_zero(lambda: shutil.rmtree(config.run.folder.reference, ignore_errors=True))
            # Before all other callbacks, because it moves the lines of an earlier start away.
            trainer.callback_handler.callbacks.insert(0, _Beginning(config, goes_on=start.goes_on))
            trainer.args.eval_on_start = bool(config.evaluate.at_start) and start.checkpoint is None
            first = "evaluating, then taking the first step" if trainer.args.eval_on_start else "taking the first step"
            with naming_lack_of_memory(self.plan), reporting(first) as ended:
                trainer.add_callback(_FirstStep(ended))
                trainer.train(resume_from_checkpoint=start.checkpoint)
            if replicas is not None:
                # All that a later start needs is on the disk.
                replicas.remove()
            preemption.check(config.run.dir)
            # For a run without checkpoints; with checkpoints, the last save has written the ledger.
            trainer.checkpointer.write_ledger()
            not_uploaded = finish(trainer, self.data.held_out, config, self._usage, stopped_by=budget.stopped_by)
            budget.check()
        if not_uploaded is not None:
            raise not_uploaded

    def _make_budget(self) -> Budget:
        assert self.trainer.engine is not None
        sizes = {
            "num_parameters": self.trainer.engine.size.num_parameters,
            "num_held_out": len(self.data.held_out or ()),
        }
        return Budget(self.config, self._usage, self._recorder, **sizes)


def _add_reports(trainer: Trainer, config: RunConfig, recorder: RunRecorder | None) -> None:
    """Add what watches the training itself; `recorder` is on rank 0."""
    folder, report = config.run.folder, config.report
    assert trainer.engine is not None
    assert trainer.strategy is not None
    if report.timeline:
        trainer.add_callback(TimelineDrawer(folder, trainer.engine))
    if recorder is not None and report.alerts:
        alerts = Alerts(recorder, config.checkpoint, report.alert_command, trainer.log)
        trainer.add_callback(RankTimes(folder.ranks, trainer.throughput, alerts.see_ranks))
        trainer.add_callback(alerts)
    else:
        trainer.add_callback(RankTimes(folder.ranks, trainer.throughput))
    topology, warm_up_steps = trainer.strategy.topology, config.strategy.num_uncompressed_steps

    def wait() -> None:
        with trainer.waiting(SAVING):
            trainer.checkpointer.wait()

    trainer.add_callback(Traffic(topology, recorder, wait=wait, warm_up_steps=warm_up_steps))
    # The progress bar and metrics.jsonl say the same, and are easier to read.
    trainer.remove_callback(PrinterCallback)


class _FirstStep(TrainerCallback):
    """Ends the report of the start."""

    def __init__(self, ended: Event) -> None:
        self._ended = ended

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End it; later steps move the bar."""
        self._ended.set()


class _Beginning(TrainerCallback):
    """Writes the config after the checkpoint is read, so that a refused start leaves the config of the folder's run.

    If the run does not continue an earlier start in the folder, this moves all lines of that start away.
    """

    def __init__(self, config: RunConfig, *, goes_on: bool) -> None:
        self._config, self._goes_on = config, goes_on

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Call on all ranks."""
        on_rank_zero(self._begin)

    def _begin(self) -> None:
        folder = self._config.run.folder
        folder.config.write_text(to_yaml(self._config), encoding="utf-8")
        if not self._goes_on:
            for path in (folder.metrics, folder.ranks, folder.samples, folder.rollouts):
                set_aside(path)
            # Trackers begin a new run, too.
            folder.trackers.unlink(missing_ok=True)
