"""STUB by the main author, to be replaced."""
from hfdist.config.pipeline import ONE_F_ONE_B, Schedule


def stages_per_rank(schedule, asked):
    return asked or (1 if schedule in (Schedule.gpipe, ONE_F_ONE_B) else 2)
def rank_of_stage(schedule, num_ranks, per_rank):
    if schedule in (Schedule.zbv, Schedule.dualpipev):
        return tuple(range(num_ranks)) + tuple(reversed(range(num_ranks)))
    return tuple(range(num_ranks)) * per_rank
def check_microbatches(schedule, **kw): pass
def bubble_fraction(schedule, *, num_ranks, stages_per_rank, num_microbatches):
    return (num_ranks-1)/(stages_per_rank*num_microbatches+num_ranks-1)
