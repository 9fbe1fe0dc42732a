"""What each pipeline schedule asks of stages and micro-batches. Torch-free: checks use it too.

A schedule is the order in which a rank takes micro-batches forward and back through its stages.
The conditions are those of torch.distributed.pipelining, which runs them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from titan_moe.config.schedule_csv import Order, read_order
from titan_moe.config.sections import Parallelism, RunConfig

Needs = Callable[[int, int, int], str | None]


def _any_number(ranks: int, stages: int, micro_batches: int) -> str | None:
    return None


def _one_per_stage(ranks: int, stages: int, micro_batches: int) -> str | None:
    if micro_batches >= stages:
        return None
    return f"needs a micro-batch per stage, but has {micro_batches} for {stages} stages"


def _equal_rounds(ranks: int, stages: int, micro_batches: int) -> str | None:
    rounds = max(1, micro_batches // ranks)
    if micro_batches % rounds == 0:
        return None
    return (
        f"goes in {micro_batches} // {ranks} ranks = {rounds} rounds, which do not divide the "
        f"{micro_batches} micro-batches; a multiple of {ranks} does"
    )


@dataclass(frozen=True)
class Schedule:
    """One row of the table.

    stages_per_rank: how many it has unless told otherwise. fixed: it takes no other number.
    v_shaped: a rank's second stage counts from the end, so that the last rank holds the two in the
        middle and the first rank both ends; otherwise stages go round the ranks, again and again.
    splits_backward: gradients of inputs are sent before those of weights are computed.
    needs: (ranks, stages, micro-batches) -> what is wrong with that many micro-batches, or None.
    """

    stages_per_rank: int
    fixed: bool
    v_shaped: bool
    splits_backward: bool
    needs: Needs

    def stage_ranks(self, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
        """The rank that holds each stage."""
        there = tuple(range(ranks))
        if self.v_shaped:
            assert stages_per_rank == 2
            return there + there[::-1]
        return there * stages_per_rank


SCHEDULES = {
    #                              stages        V      splits  micro-batches
    "GPipe": Schedule(1, True, False, False, _any_number),
    "1F1B": Schedule(1, True, False, False, _one_per_stage),
    "Interleaved1F1B": Schedule(2, False, False, False, _equal_rounds),
    "LoopedBFS": Schedule(2, False, False, False, _any_number),
    "InterleavedZeroBubble": Schedule(2, False, False, True, _equal_rounds),
    "ZBVZeroBubble": Schedule(2, True, True, True, _any_number),
    "DualPipeV": Schedule(2, True, True, True, _one_per_stage),
}


def stage_ranks(section: Parallelism) -> tuple[int, ...]:
    """The pipeline rank that holds each stage; as many as there are stages.

    Raises:
        ValueError: a number of stages per rank that the schedule does not take, or a file that is
            no order for so many ranks.
        OSError: the file cannot be read.
    """
    ranks = section.pipeline_parallel_degree
    if ranks == 1:
        return (0,)
    if (order := _order_of(section)) is not None:
        return order.stage_ranks
    schedule = SCHEDULES[section.pipeline_parallel_schedule]
    stages = section.pipeline_parallel_stages_per_rank or schedule.stages_per_rank
    if schedule.fixed and stages != schedule.stages_per_rank:
        raise ValueError(
            f"parallelism.pipeline_parallel_stages_per_rank = {stages}: "
            f"{section.pipeline_parallel_schedule} has exactly {schedule.stages_per_rank}"
        )
    return schedule.stage_ranks(ranks, stages)


def num_stages(section: Parallelism) -> int:
    """Stages of the whole pipeline. Raises as `stage_ranks`."""
    return len(stage_ranks(section))


def splits_backward(section: Parallelism) -> bool:
    """Whether backward is run in two parts, inputs and weights. Raises as `stage_ranks`."""
    if section.pipeline_parallel_degree == 1:
        return False
    if (order := _order_of(section)) is not None:
        return order.splits_backward
    return SCHEDULES[section.pipeline_parallel_schedule].splits_backward


def micro_batches(config: RunConfig, dp_degree: int) -> int:
    """Micro-batches that a pipeline takes from the rows of one of `dp_degree` data ranks at once.

    Raises:
        ValueError: pipeline_parallel_microbatch_size does not divide those rows.
    """
    rows = config.training.rows_per_pass(dp_degree)
    size = config.parallelism.pipeline_parallel_microbatch_size
    if rows % size:
        raise ValueError(
            f"parallelism.pipeline_parallel_microbatch_size = {size}: does not divide the {rows} "
            f"rows that a rank computes between accumulations"
        )
    return rows // size


def micro_batches_fault(section: Parallelism, micro_batches: int) -> str | None:
    """Why the schedule cannot be run with so many micro-batches, or None. Raises as `stage_ranks`.

    The message begins with the schedule: "1F1B needs ...".
    """
    ranks = section.pipeline_parallel_degree
    if ranks == 1:
        return None
    if (order := _order_of(section)) is not None:
        if order.micro_batches == micro_batches:
            return None
        return (
            f"{section.pipeline_parallel_schedule_csv} is an order for {order.micro_batches} "
            f"micro-batches, not for {micro_batches}"
        )
    name = section.pipeline_parallel_schedule
    fault = SCHEDULES[name].needs(ranks, num_stages(section), micro_batches)
    return fault and f"{name} {fault}"


def _order_of(section: Parallelism) -> Order | None:
    path = section.pipeline_parallel_schedule_csv
    return None if path is None else read_order(path, section.pipeline_parallel_degree)
