"""How much of a step to trace: until no more micro-batches would be in flight, and not further.

A pipeline's order is torch's own. Weights of a stage are gathered and let go of by the same order
where a rank has several stages.
"""

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from titan_moe.config.schedules import micro_batches_fault, stage_ranks
from titan_moe.config.sections import Parallelism, RunConfig
from titan_moe.parallel.pipeline import torch_schedule
from titan_moe.planner.case import Case

# One of them is then neither the first nor the last, and stands for all that are left out.
TYPICAL = 3


@dataclass(frozen=True)
class Cut:
    """What is traced of a step: so many passes of so many micro-batches.

    whole: what it stands for.
    """

    passes: int
    micro_batches: int
    whole_passes: int
    whole_micro_batches: int

    @classmethod
    def of(cls, case: Case, pipeline_rank: int) -> "Cut":
        """In the second pass, gradients are there already; the last is the last.

        Replicas add up in the last alone, to what all others have left: in between is one more.
        """
        passes, of_pass = case.passes, case.micro_batches // case.passes
        traced = min(passes, 2 if case.layout.dp_replicate == 1 else 3)
        few = 1 if case.layout.pp == 1 else _enough(case, pipeline_rank, of_pass)
        return cls(traced, few, passes, of_pass)

    def config(self, case: Case) -> RunConfig:
        """The case's, with as few rows in a step."""
        rows = case.rows_per_micro_batch * self.micro_batches
        training = case.config.training.model_copy(
            update={
                "local_batch_size": rows,
                "global_batch_size": rows * self.passes * case.layout.dp_degree,
            }
        )
        return case.config.model_copy(update={"training": training})


def unshards(section: Parallelism, rank: int, micro_batches: int) -> Counter[int]:
    """How often an order of several stages asks for the weights of each, on one rank."""
    return Counter(a.stage_index for a in _actions(section, rank, micro_batches) if a.kind == "U")


@dataclass(frozen=True)
class _Action:
    """kind: F, B, I, W, or U: gather the weights of a stage."""

    stage_index: int
    kind: str


def _enough(case: Case, rank: int, whole: int) -> int:
    """The fewest micro-batches that let no action begin with less behind it than in `whole`."""
    section = case.config.parallelism
    if section.pipeline_parallel_schedule_csv is not None:
        return whole  # it is an order for that number alone
    needed = _loads(section, rank, whole)
    for few in range(min(TYPICAL, whole), whole):
        if micro_batches_fault(section, few) is None:
            reached = _loads(section, rank, few)
            if all(_is_reached(loads, reached[action]) for action, loads in needed.items()):
                return few
    return whole


Load = tuple[int, ...]


def _is_reached(loads: set[Load], reached: set[Load]) -> bool:
    """Whether for each load there is one that is no less in anything."""
    return all(
        load in reached
        or any(all(a <= b for a, b in zip(load, other, strict=True)) for other in reached)
        for load in loads
    )


def _loads(section: Parallelism, rank: int, micro_batches: int) -> dict["_Action", set[Load]]:
    """What is in memory when an action begins: of each stage, micro-batches that wait for their
    backward, those of which half of it is done, and whether there are gradients.
    """
    actions = _actions(section, rank, micro_batches)
    places = {stage: 3 * n for n, stage in enumerate(sorted({a.stage_index for a in actions}))}
    load = [0] * 3 * len(places)
    found: dict[_Action, set[Load]] = {}
    for action in actions:
        found.setdefault(action, set()).add(tuple(load))
        waiting = places[action.stage_index]
        if action.kind == "F":
            load[waiting] += 1
        elif action.kind == "I":
            load[waiting] -= 1
            load[waiting + 1] += 1
        elif action.kind in "BW":
            load[waiting + (action.kind == "W")] -= 1
            load[waiting + 2] = 1
    return found


def _actions(section: Parallelism, rank: int, micro_batches: int) -> list[_Action]:
    """One rank's, in order."""
    ranks = section.pipeline_parallel_degree
    if section.pipeline_parallel_schedule == "GPipe":
        return [_Action(rank, "F")] * micro_batches + [_Action(rank, "B")] * micro_batches
    if section.pipeline_parallel_schedule == "1F1B":
        ahead = min(micro_batches, ranks - rank)
        steady = [_Action(rank, "B"), _Action(rank, "F")] * (micro_batches - ahead)
        return [_Action(rank, "F")] * ahead + steady + [_Action(rank, "B")] * ahead
    schedule = torch_schedule(section, _pretended_stages(section, rank), micro_batches, None)
    return [
        _Action(each.stage_index, _KINDS[each.computation_type.value])
        for action in schedule.pipeline_order_with_comms[rank]
        for each in action.sub_actions or (action,)
        if each.computation_type.value in _KINDS
    ]


_KINDS = {"F": "F", "B": "B", "I": "I", "W": "W", "UNSHARD": "U"}


def _pretended_stages(section: Parallelism, rank: int) -> list[Any]:
    """As much of torch's as an order asks for."""
    holders = stage_ranks(section)
    return [
        SimpleNamespace(
            stage_index=stage,
            num_stages=len(holders),
            submod=None,
            group_size=section.pipeline_parallel_degree,
            group_rank=rank,
        )
        for stage, holder in enumerate(holders)
        if holder == rank
    ]
