"""Prove that a layout trains as one process does: the asked run in small, in both, compared by name.

accelerate launch --config_file conf/launch/cpu_2.yaml recipes/prove.py strategy=zero2
"""

from pathlib import Path

from hfdist.config.cli.command import recipe
from hfdist.config.run import RunConfig
from hfdist.garbage_collector import quick_imports
from hfdist.run import prepare_run


@recipe(primary="pretrain", trains=False)
def main(config: RunConfig) -> None:
    """Train in the layout, again from a checkpoint, and on one process, and print a certificate."""
    # Imported here, so that --help and what the command has checked by now need no torch.
    with quick_imports():
        from hfdist.verify.parity import conclude
        from hfdist.verify.proof_configs import prepare_proof

    proof = prepare_proof(config)
    kernels = train_small(proof.layout)
    train_small(proof.resumed)
    conclude(proof._replace(kernels=kernels), recipe=Path(__file__).with_name("pretrain.py"))


def train_small(config: RunConfig) -> str:
    """Do what pretraining does, with a small model of the same architecture and without an export.

    Returns:
        What computed it.
    """
    from hfdist.run.summary import describe_kernels
    from hfdist.verify.small_model import use_small_model

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
    return describe_kernels(run.trainer)


if __name__ == "__main__":
    main()
