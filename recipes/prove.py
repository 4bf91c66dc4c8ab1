"""Prove that a layout trains as one process does: the asked run in small, in both, compared by name.

accelerate launch --config_file conf/launch/cpu_2.yaml recipes/prove.py strategy=zero2
"""

from pathlib import Path

from hfdist.config.cli.command import quick_imports, recipe
from hfdist.config.run import RunConfig
from hfdist.trainer.run import prepare_run


@recipe(primary="pretrain")
def main(config: RunConfig) -> None:
    """Train in the layout, again from a checkpoint, and on one process, and print a certificate."""
    # Imported here, so that --help and what the command has checked by now need no torch.
    with quick_imports():
        from hfdist.verify.parity import conclude, prepare_proof

    proof = prepare_proof(config)
    used = train_small(proof.layout)
    train_small(proof.resumed)
    proof = proof._replace(description=f"{proof.description}; {used}")
    conclude(proof, recipe=Path(__file__).with_name("pretrain.py"))


def train_small(config: RunConfig) -> str:
    """Do what pretraining does, with a small model of the same architecture and without an export.

    Returns:
        What the layout used: see `Engine.description`.
    """
    from hfdist.verify.parity import use_small_model

    run = prepare_run(config)
    run.find_model()
    run.open_data()
    use_small_model(run)
    run.open_folder()
    run.start_ranks()
    run.build_model()
    run.build_trainer()
    resume = config.checkpoint.resume
    run.trainer.train(resume_from_checkpoint=None if resume == "auto" else resume)
    if run.data.held_out is not None:
        run.trainer.evaluate()
    assert run.trainer.engine is not None
    return run.trainer.engine.description


if __name__ == "__main__":
    main()
