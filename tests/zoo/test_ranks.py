"""On real ranks: each cuts its model, settles with the others on what travels, and trains its stage."""

from dataclasses import dataclass

import pytest
import torch.distributed as dist

from hfdist.config.strategy import ONE_F_ONE_B, StrategyConfig
from hfdist.models.blocks import find_block_parts
from hfdist.pipeline.infer_stage_io import infer_stage_io
from hfdist.pipeline.split import split_at_blocks
from hfdist.strategies.gradients.reduction import sum_gradients
from hfdist.strategies.mesh import build_mesh
from hfdist.testing import run_ranks
from tests.zoo.models import tiny_batch, tiny_model
from tests.zoo.splitting import (
    TOLERANCE,
    Run,
    compare_gradients,
    compare_losses,
    even_stages,
    run_stages,
    run_whole,
    take_gradients,
)

pytestmark = [pytest.mark.zoo, pytest.mark.distributed]

KINDS = {
    **dict.fromkeys(("blt", "gemma4_text", "llama tied", "zamba2"), 3),
    **dict.fromkeys(("mamba2", "xlm"), 2),
}
"""Each on as many ranks; test_pipeline_mesh.py has other types, as whole engines."""


@dataclass(frozen=True)
class Share:
    """What one rank of a pipeline held and computed."""

    travels: str
    names: frozenset[str]
    """Of its parameters, with all names of those that are tied."""
    losses: tuple[float, ...]
    gradient_difference: float
    worst_parameter: str


def make(kind):
    """The model and two batches of different lengths, equal in every process."""
    model_type, *tied = kind.split()
    model = tiny_model(model_type)
    if tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return model, [tiny_batch(model, seed=seed, tokens=tokens) for seed, tokens in ((1, 16), (2, 24), (3, 16))]


def train_one_stage(kind: str, expected: Run) -> Share:
    """What each rank does."""
    num_ranks = dist.get_world_size()
    topology = StrategyConfig(pipeline=num_ranks).topology(num_ranks, rank=dist.get_rank())
    model, batches = make(kind)
    blocks = find_block_parts(model)
    cut = split_at_blocks(model, blocks, even_stages(len(blocks), num_ranks), [topology.pipeline_rank])
    rank_of_stage = tuple(range(num_ranks))
    stage_io = infer_stage_io(cut, rank_of_stage, topology, build_mesh(topology))
    losses = run_stages(cut, stage_io.carry, rank_of_stage, batches, schedule=ONE_F_ONE_B)
    for group, names in stage_io.shared:
        sum_gradients([model.get_parameter(name) for name in names], group)
    gradients = take_gradients(model)
    difference, worst = compare_gradients(gradients, expected.gradients)
    return Share(stage_io.carry.describe(), frozenset(gradients), losses, difference, worst)


@pytest.mark.parametrize(("kind", "num_ranks"), KINDS.items())
def test_ranks_train_as_one_process(kind, num_ranks):
    model, batches = make(kind)
    whole = run_whole(model, batches)
    shares = run_ranks(train_one_stage, num_ranks, kind, whole)
    assert compare_losses(shares[-1].losses, whole.losses) <= TOLERANCE
    for share in shares:
        assert share.gradient_difference <= TOLERANCE, share.worst_parameter
    assert len({share.travels for share in shares}) == 1
    check_parts(model, shares)


def check_parts(model, shares):
    """No rank holds another's blocks, and every parameter has a rank."""
    blocks = find_block_parts(model)
    everything = names_of(model, model.parameters())
    inside = names_of(model, (p for block in blocks for part in block for p in part.parameters()))
    assert frozenset.union(*(share.names for share in shares)) == everything
    for share, stage in zip(shares, even_stages(len(blocks), len(shares)), strict=True):
        own = names_of(model, (p for index in stage for part in blocks[index] for p in part.parameters()))
        assert share.names & inside == own
    if shares[0].travels == "hidden states":
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        at_ends = names_of(model, (p for end in ends if end is not None for p in end.parameters()))
        assert at_ends <= shares[0].names | shares[-1].names
        assert not any(share.names & at_ends for share in shares[1:-1])


def names_of(model, parameters):
    """All names of these parameters, also those that others are tied to."""
    wanted = {id(parameter) for parameter in parameters}
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in wanted}
