"""Prove that a layout trains as one process does: the asked run in small, in both, compared by name.

accelerate launch --config_file conf/launch/cpu_2.yaml recipes/prove.py strategy=zero2
"""

from pathlib import Path

from hfdist.config.cli.command import quick_imports, recipe
from hfdist.config.run import RunConfig


@recipe(primary="pretrain")
def main(config: RunConfig) -> None:
    """Train in the layout, again from a checkpoint, and on one process, and print a certificate."""
    # Imported here, so that --help and what the command has checked by now need no torch.
    with quick_imports():
        from hfdist.verify.parity_runs import conclude, prepare_proof

    proof = prepare_proof(config)
    train_small(proof.layout)
    train_small(proof.resumed)
    conclude(proof, recipe=Path(__file__).with_name("pretrain.py"))


def train_small(config: RunConfig) -> None:
    """Do what pretraining does, with a small model of the same architecture and without an export."""
    with quick_imports():
        from hfdist.models import Trained, build_model, find_architecture, fit_vocabulary
        from hfdist.strategies.select import select_strategy
        from hfdist.trainer.run.builder import (
            build_data,
            build_trainer,
            find_max_steps,
            locate_model,
            open_run,
            prepare_run,
        )
        from hfdist.trainer.run.training_arguments import build_arguments
        from hfdist.verify.parity_runs import ARCHITECTURE, small_architecture

    topology, batch = prepare_run(config)
    strategy = select_strategy(config.strategy, config.train, topology=topology, batch=batch)
    here = locate_model(config)
    data = build_data(here.config, topology)
    architecture = find_architecture(here.config.model, sequence_length=config.data.sequence_length)
    architecture = small_architecture(architecture, config.strategy, vocab_size=len(data.tokenizer))
    fit_vocabulary(architecture, data.tokenizer, here.config.model)
    open_run(config, topology)
    if topology.is_main:
        architecture.save_pretrained(Path(config.run.dir).with_name(ARCHITECTURE))
    # Before the model: ZeRO-3 cuts it while it is made.
    arguments = build_arguments(config, strategy, max_steps=find_max_steps(here.config, data))
    model = build_model(
        here.config.model, architecture, seed=config.train.seed, cut=strategy.cut, trained=Trained.of(config)
    )
    trainer = build_trainer(config, arguments, model, strategy, data)
    resume = config.checkpoint.resume
    trainer.train(resume_from_checkpoint=None if resume == "auto" else resume)
    if data.held_out is not None:
        trainer.evaluate()


if __name__ == "__main__":
    main()
