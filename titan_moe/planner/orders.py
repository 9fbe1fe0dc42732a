"""The order in which each pipeline rank takes micro-batches through its stages: torch's own.

An action is `Action(stage, kind, micro_batch)`, kind one of F forward, B backward, or in its place
I and later W: gradients of inputs, of weights.
"""

import csv
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from titan_moe.config.schedule_csv import ACTION, Action
from titan_moe.config.schedules import stage_ranks
from titan_moe.config.sections import Parallelism

Order = tuple[tuple[Action, ...], ...]
"""Of each pipeline rank its actions."""

# What changes an order; two sections that agree in these have one.
_KEYS = (
    "pipeline_parallel_degree",
    "pipeline_parallel_schedule",
    "pipeline_parallel_schedule_csv",
    "pipeline_parallel_stages_per_rank",
)


def order_of(section: Parallelism, micro_batches: int) -> Order:
    """What `parallel/pipeline.py` runs for one pass; without a pipeline forward and backward.

    Raises:
        ValueError, OSError: as `stage_ranks`; and for a number of micro-batches that the schedule
            does not take, which `micro_batches_fault` tells beforehand.
    """
    return _order(tuple(getattr(section, key) for key in _KEYS), micro_batches)


@lru_cache(maxsize=512)
def _order(keys: tuple[Any, ...], micro_batches: int) -> Order:
    section = Parallelism(**dict(zip(_KEYS, keys, strict=True)))
    ranks = section.pipeline_parallel_degree
    if ranks == 1:
        return (tuple(Action(0, kind, m) for m in range(micro_batches) for kind in "FB"),)
    if section.pipeline_parallel_schedule_csv is not None:
        return _of_file(section.pipeline_parallel_schedule_csv)
    if section.pipeline_parallel_schedule == "GPipe":
        return tuple(
            tuple(Action(rank, kind, m) for kind in "FB" for m in range(micro_batches))
            for rank in range(ranks)
        )
    if section.pipeline_parallel_schedule == "1F1B":
        return tuple(_one_f_one_b(rank, ranks, micro_batches) for rank in range(ranks))
    return _of_torch(section, micro_batches)


def _one_f_one_b(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    """As torch's Schedule1F1B loops: as many forwards as stages follow, then turn by turn."""
    ahead = min(micro_batches, ranks - rank)
    steady = [
        action
        for m in range(micro_batches - ahead)
        for action in (Action(rank, "B", m), Action(rank, "F", m + ahead))
    ]
    last = [Action(rank, "B", m) for m in range(micro_batches - ahead, micro_batches)]
    return (*(Action(rank, "F", m) for m in range(ahead)), *steady, *last)


def _of_torch(section: Parallelism, micro_batches: int) -> Order:
    from torch.distributed.pipelining.schedules import get_schedule_class

    holders, ranks = stage_ranks(section), section.pipeline_parallel_degree
    # As much of torch's stages as an order asks for.
    stages = [
        SimpleNamespace(
            stage_index=stage, num_stages=len(holders), submod=None, group_size=ranks, group_rank=0
        )
        for stage, holder in enumerate(holders)
        if holder == 0
    ]
    kind: Any = get_schedule_class(section.pipeline_parallel_schedule)
    of_ranks = kind(stages, micro_batches).pipeline_order
    return tuple(
        tuple(
            Action(each.stage_index, each.computation_type.value, each.microbatch_index)
            for action in of_ranks[rank]
            if action is not None
            for each in (action.sub_actions or (action,))
        )
        for rank in range(ranks)
    )


def _of_file(path: str) -> Order:
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    return tuple(
        tuple(
            Action(int(stage), kind, int(micro_batch))
            for cell in row
            for stage, kind, micro_batch in ACTION.findall(cell)
        )
        for row in rows
    )
