"""Days, cost and goodput against sums by hand, against a simulated machine, and a published run."""

import math

import numpy as np
import pytest

from titan_moe.config.layout import Layout
from titan_moe.planner.economy import (
    best_interval,
    checkpoint_bytes_per_rank,
    economy,
    expected_goodput,
)
from titan_moe.planner.figures import Memory, RankMemory

HOUR, DAY = 3600.0, 86400.0

# Work between saves, save, restart, mean time between failures.
MACHINES = [
    (300.0, 20.0, 600.0, 3 * HOUR),
    (3000.0, 120.0, 900.0, HOUR),
    (50.0, 50.0, 100.0, 400.0),
    (10.0, 0.0, 5.0, 60.0),
]


def simulated_goodput(work: float, save: float, restart: float, mtbf: float) -> float:
    """A machine that fails at random, walked through failure by failure.

    Uptime from one failure to the next holds so many whole segments; the rest of it is lost, and so
    is all that a restart holds which itself ends in a failure.
    """
    lives = np.random.default_rng(0).exponential(mtbf, 400_000)
    working = np.maximum(lives - restart, 0.0)  # each life begins with a restart
    return float(np.floor(working / (work + save)).sum() * work / lives.sum())


@pytest.mark.parametrize("machine", MACHINES)
def test_goodput_is_that_of_a_simulated_machine(machine: tuple[float, ...]) -> None:
    work, save, restart, mtbf = machine
    assert expected_goodput(work, save, restart, mtbf) == pytest.approx(
        simulated_goodput(work, save, restart, mtbf), rel=0.01
    )


@pytest.mark.parametrize("save", [0.5, 20.0, 600.0, 4000.0])
@pytest.mark.parametrize("mtbf", [HOUR, 100 * HOUR])
def test_the_interval_is_the_best_of_many(save: float, mtbf: float) -> None:
    """Among ten thousand intervals, by the mean length of a segment written out as a sum.

    A segment is tried until it passes: with probability p = e^(-(T+C)/M) it does, and each failed
    try costs the mean time to a failure that comes within it, and the restarts.
    """
    restart = 300.0
    work = np.geomspace(save / 10, 100 * mtbf, 10_001)
    passes = np.exp(-(work + save) / mtbf)
    until_failure = mtbf - (work + save) * passes / (1 - passes)
    restart_passes = math.exp(-restart / mtbf)
    failed_restart = mtbf - restart * restart_passes / (1 - restart_passes)
    with_restarts = restart + (1 / restart_passes - 1) * failed_restart
    length = work + save + (1 / passes - 1) * (until_failure + with_restarts)
    best = work[np.argmax(work / length)]
    assert best_interval(save, mtbf) == pytest.approx(best, rel=3e-3)


def test_young_where_saves_are_short() -> None:
    assert best_interval(1.0, 1e8) == pytest.approx(math.sqrt(2 * 1.0 * 1e8), rel=1e-4)
    assert best_interval(0.0, HOUR) == 0.0


def test_by_hand_without_failures() -> None:
    plan = economy(10.0, 1_000_000, 256, 1e9 + 1, price_per_gpu_hour=3.0)
    assert plan.steps == 1001
    assert plan.days == plan.days_of_steps == pytest.approx(1001 * 10 / DAY)
    assert plan.gpu_hours == pytest.approx(1001 * 10 / HOUR * 256)
    assert plan.cost == pytest.approx(plan.gpu_hours * 3)
    assert plan.reliability is None
    assert economy(10.0, 1_000_000, 256, 1e9).cost is None


def test_with_failures() -> None:
    """A checkpoint of 5 GB per rank: 20 s to write, 10 s to read and ten minutes besides."""
    plan = economy(
        7.0, 1_000_000, 256, 1e12, mtbf_hours=25_600.0, checkpoint_bytes_per_rank=5 * 10**9
    )
    kept = plan.reliability
    assert kept is not None
    assert (kept.machine_mtbf_hours, kept.save_seconds, kept.restart_seconds) == (100, 20, 610)
    assert kept.interval_seconds == 7 * kept.interval_steps
    assert kept.interval_seconds == pytest.approx(math.sqrt(2 * 20 * 100 * HOUR), rel=0.01)
    others = [expected_goodput(7.0 * n, 20.0, 610.0, 100 * HOUR) for n in range(1, 2000)]
    assert kept.goodput == max(others)
    assert plan.days == pytest.approx(plan.days_of_steps / kept.goodput)
    assert kept.failures == pytest.approx(plan.days * 24 / 100)


def test_steps_longer_than_the_best_interval_are_saved_one_by_one() -> None:
    plan = economy(1000.0, 1, 1, 10.0, mtbf_hours=1.0, checkpoint_bytes_per_rank=10**6)
    assert plan.reliability is not None
    assert plan.reliability.interval_steps == 1


def test_what_costs_nothing_to_save_is_saved_every_step() -> None:
    plan = economy(10.0, 1, 1, 10.0, mtbf_hours=1.0)
    assert plan.reliability is not None
    assert (plan.reliability.interval_steps, plan.reliability.save_seconds) == (1, 0.0)


def test_llama_3() -> None:
    """405B on 16,384 GPUs: 419 stops in 54 days, over 90% of the time effective (arXiv 2407.21783,
    section 3.3.4)."""
    mtbf_hours = 54 * 24 / 419 * 16_384
    params = 405e9
    plan = economy(
        25.0,
        16 * 2**20,
        16_384,
        15.6e12,
        mtbf_hours=mtbf_hours,
        checkpoint_bytes_per_rank=int(params * 12 / 16_384),
    )
    assert plan.reliability is not None
    assert 0.90 < plan.reliability.goodput < 0.97


def test_a_machine_that_always_fails_is_told() -> None:
    with pytest.raises(
        ValueError, match=r"1000 GPUs that each fail once in 1 hours stop every 3\.6 s"
    ):
        economy(10.0, 1, 1000, 1e6, mtbf_hours=1.0, checkpoint_bytes_per_rank=10**9)


def test_replicas_share_the_writing() -> None:
    ranks = tuple(
        RankMemory(rank, weights=weights, gradients=7, optimizer=20, activations=9, buffers=1)
        for rank, weights in enumerate((10, 11))
    )
    memory = Memory(ranks, 100, "traced")
    assert checkpoint_bytes_per_rank(memory, Layout(pp=2)) == 31
    assert checkpoint_bytes_per_rank(memory, Layout(pp=2, dp_replicate=2)) == 16
