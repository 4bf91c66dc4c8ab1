"""Fine-tune a causal language model of the Hub.

accelerate launch --config_file conf/launch/cpu_2.yaml recipes/finetune.py strategy=ddp model.name=ID data=...
"""

from hfdist.config.cli.command import quick_imports, recipe
from hfdist.config.run import RunConfig


@recipe(primary="finetune")
def main(config: RunConfig) -> None:
    """Build the run from its config, in the order in which mistakes are cheapest to find, and train."""
    # Imported here, so that --help and what the command has checked by now need no torch.
    with quick_imports():
        from hfdist.models import Trained, build_model, check_fields, find_architecture, fit_vocabulary

        check_fields(config.model)
        from hfdist.strategies.select import select_strategy
        from hfdist.trainer.run.builder import (
            build_data,
            build_trainer,
            find_max_steps,
            locate_model,
            open_run,
            prepare_run,
            train,
        )
        from hfdist.trainer.run.training_arguments import build_arguments

    topology, batch = prepare_run(config)
    strategy = select_strategy(config.strategy, config.train, topology=topology, batch=batch)
    here = locate_model(config)  # from here on `here.config` has folders where `config` may name the Hub
    architecture = find_architecture(here.config.model, sequence_length=config.data.sequence_length)
    data = build_data(here.config, topology)
    fit_vocabulary(architecture, data.tokenizer, here.config.model)
    open_run(config, topology)  # a folder with checkpoints of another config is told once all else is right
    here.fetch_weights()
    # Before the model: ZeRO-3 cuts it while it is made.
    arguments = build_arguments(config, strategy, max_steps=find_max_steps(here.config, data))
    model = build_model(
        here.config.model, architecture, seed=config.train.seed, cut=strategy.cut, trained=Trained.of(config)
    )
    trainer = build_trainer(config, arguments, model, strategy, data)
    train(trainer, data, config)


if __name__ == "__main__":
    main()
