"""Orders are those that torch runs; their timelines are right where a hand can count them.

p pipeline ranks, m micro-batches, v stages per rank.
"""

from itertools import pairwise
from pathlib import Path

import pytest

from titan_moe.config.schedule_csv import Action
from titan_moe.config.schedules import SCHEDULES, num_stages
from titan_moe.config.sections import Parallelism
from titan_moe.planner.orders import Order, order_of
from titan_moe.planner.timeline import simulate, simulate_many

FORWARD, BACKWARD = 1.0, 2.0


def section(schedule: str, ranks: int, stages_per_rank: int | None = None) -> Parallelism:
    return Parallelism(
        pipeline_parallel_degree=ranks,
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_stages_per_rank=stages_per_rank,
    )


def even(action: Action) -> float:
    return {"F": FORWARD, "B": BACKWARD, "I": BACKWARD / 2, "W": BACKWARD / 2}[action.kind]


def uneven(action: Action) -> float:
    return even(action) * (1 + 0.37 * action.stage)


def no_hop(source: int, target: int) -> float:
    return 0.0


def some_hop(source: int, target: int) -> float:
    return 0.05


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [8, 16])
def test_every_stage_takes_every_micro_batch_there_and_back_once(
    schedule: str, micro_batches: int
) -> None:
    at = section(schedule, 4)
    order = order_of(at, micro_batches)
    actions = [action for of_rank in order for action in of_rank]
    assert len(actions) == len(set(actions))
    for stage in range(num_stages(at)):
        for kinds in ("F", "BW", "BI"):
            of_kind = sorted(a.micro_batch for a in actions if a.stage == stage and a.kind in kinds)
            assert of_kind == list(range(micro_batches)), (stage, kinds)


def test_1f1b_by_hand() -> None:
    """Rank 0 goes two ahead, rank 1 one."""
    assert [[str(a) for a in of_rank] for of_rank in order_of(section("1F1B", 2), 3)] == [
        ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"],
        ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"],
    ]


def test_a_file_is_its_own_order(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,(1F1;1B1)OVERLAP_F_B\n")
    at = Parallelism(pipeline_parallel_degree=2, pipeline_parallel_schedule_csv=str(path))
    assert [[str(a) for a in of_rank] for of_rank in order_of(at, 2)] == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1B0", "1F1", "1B1"],
    ]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_even_stages_wait_for_one_micro_batch_per_other_rank(schedule: str, ranks: int) -> None:
    """(m + p - 1)(F + B): a bubble of (p - 1)/m (arXiv 2104.04473, section 2.2.1)."""
    micro_batches = 8
    timed = simulate(order_of(section(schedule, ranks), micro_batches), even, no_hop)
    assert timed.seconds == (micro_batches + ranks - 1) * (FORWARD + BACKWARD)
    assert timed.busy == (micro_batches * (FORWARD + BACKWARD),) * ranks


@pytest.mark.parametrize("stages_per_rank", [2, 4])
def test_virtual_stages_divide_the_bubble(stages_per_rank: int) -> None:
    """(p - 1)/v stages' forward and backward (arXiv 2104.04473, section 2.2.2)."""
    ranks, micro_batches = 4, 8
    order = order_of(section("Interleaved1F1B", ranks, stages_per_rank), micro_batches)
    timed = simulate(order, even, no_hop)
    work = micro_batches * stages_per_rank * (FORWARD + BACKWARD)
    assert timed.busy == (work,) * ranks
    assert timed.seconds == work + (ranks - 1) * (FORWARD + BACKWARD)


def test_a_backward_in_two_parts_fills_the_bubble() -> None:
    def bubble(schedule: str) -> float:
        timed = simulate(order_of(section(schedule, 4), 16), even, no_hop)
        return timed.seconds - max(timed.busy)

    assert bubble("ZBVZeroBubble") < bubble("Interleaved1F1B") / 2


def test_hops_delay_the_way_there_and_back() -> None:
    """One micro-batch over p ranks: p - 1 hops each way."""
    ranks, hop = 4, 0.05
    timed = simulate(order_of(section("GPipe", ranks), 1), even, some_hop)
    assert timed.seconds == pytest.approx(ranks * (FORWARD + BACKWARD) + 2 * (ranks - 1) * hop)


def test_the_slowest_stage_sets_the_pace() -> None:
    ranks, micro_batches = 4, 40
    timed = simulate(order_of(section("1F1B", ranks), micro_batches), uneven, no_hop)
    slowest = max(timed.busy)
    assert slowest == pytest.approx(micro_batches * uneven(Action(3, "F", 0)) * 3)
    assert slowest < timed.seconds < slowest + (ranks - 1) * (FORWARD + BACKWARD) * 2.2


def test_an_action_begins_after_what_it_needs_and_its_rank_does_one_thing_at_a_time() -> None:
    for schedule in SCHEDULES:
        timed = simulate(order_of(section(schedule, 4), 8), uneven, some_hop)
        ends = {action: end for of_rank in timed.spans for action, _, end in of_rank}
        for of_rank in timed.spans:
            for (_, _, before), (_, begin, _) in pairwise(of_rank):
                assert begin >= before
            for action, begin, _ in of_rank:
                if action.kind == "F" and action.stage:
                    assert begin >= ends[Action(action.stage - 1, "F", action.micro_batch)]
                if action.kind == "W":
                    assert begin >= ends[Action(action.stage, "I", action.micro_batch)]


@pytest.mark.parametrize("seconds_of", [even, uneven])
@pytest.mark.parametrize("micro_batches", [60, 64])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_micro_batches_are_as_long_as_when_all_are_simulated(
    schedule: str, micro_batches: int, seconds_of: object
) -> None:
    at = section(schedule, 4)
    seen: list[int] = []

    def order_with(number: int) -> Order:
        seen.append(number)
        return order_of(at, number)

    many = simulate_many(order_with, 4, micro_batches, seconds_of, some_hop)  # type: ignore[arg-type]
    whole = simulate(order_of(at, micro_batches), seconds_of, some_hop)  # type: ignore[arg-type]
    assert many.seconds == pytest.approx(whole.seconds, rel=1e-9)
    assert many.busy == pytest.approx(whole.busy, rel=1e-9)
    assert max(seen) < micro_batches, "all of them were simulated"


def test_ranks_that_wait_for_each_other_are_found() -> None:
    last = (Action(1, "F", 0), Action(1, "B", 0))
    for first in ("BF", "FWI"):
        order = (tuple(Action(0, kind, 0) for kind in first), last)
        with pytest.raises(AssertionError, match="wait for each other"):
            simulate(order, even, no_hop)
