"""Tune a model on preferences (DPO, KTO), by rewards (GRPO, RLOO) or a teacher, or train a reward model, in any layout.

accelerate launch --config_file conf/launch/cpu_2.yaml recipes/tune.py task=dpo model.name=ID strategy=ddp data=...
"""

from hfdist.config.cli.command import recipe
from hfdist.config.run import RunConfig
from hfdist.run import check_model, prepare_run


@recipe(primary="tune", before_ranks=check_model)
def main(config: RunConfig) -> None:
    """Build the run from its config, in the order in which mistakes are cheapest to find, and train."""
    run = prepare_run(config)
    run.find_model()
    run.open_data()
    run.open_folder()
    run.start_ranks()
    run.build_model()
    run.build_trainer()
    run.train()


if __name__ == "__main__":
    main()
