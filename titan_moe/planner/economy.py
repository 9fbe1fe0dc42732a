"""Days, cost, and how much of them failures take: the whole training from one step. Torch-free.

T work between two saves, C a save, R from a failure to work again, M mean time between failures of
the whole machine; all in seconds.

Failures come at random at a constant rate 1/M, also while saving and restarting. What was done
since the last save is lost. A segment of T + C then takes M · e^(R/M) · (e^((T+C)/M) - 1) on
average (J. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
FGCS 22, 2006); goodput is T over that. It is highest where 1 - T/M = e^(-(T+C)/M), whatever R; for
C much below M that is Young's sqrt(2CM) (J. Young, CACM 17, 1974).
"""

import math
from dataclasses import dataclass

from titan_moe.config.layout import Layout
from titan_moe.planner.figures import Memory

HOUR, DAY = 3600.0, 86400.0
GB = 1e9

# Storage, per GPU: about what NVIDIA's DGX SuperPOD guide asks of its faster tier, 62 GB/s of
# writing and 125 of reading for 256 GPUs.
WRITE_GB_PER_SECOND_PER_GPU = 0.25
READ_GB_PER_SECOND_PER_GPU = 0.5
# To notice a failure, find and replace the host, and start all processes: MegaScale (arXiv
# 2402.15627, section 6.3) needs less than ten minutes on average.
REPLACE_SECONDS = 600.0
# Below that the formula is right, but there is no run.
LEAST_GOODPUT = 1e-3
HALVINGS = 200


@dataclass(frozen=True)
class Reliability:
    """mtbf_hours_per_gpu: as given, of one GPU with its share of host and network.

    interval_steps: between saves, where goodput is highest. goodput: share of the time that goes
    into steps that last. failures: to be expected over the whole training.
    assumptions: plain sentences.
    """

    mtbf_hours_per_gpu: float
    machine_mtbf_hours: float
    save_seconds: float
    restart_seconds: float
    interval_seconds: float
    interval_steps: int
    goodput: float
    failures: float
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class Economy:
    """days_of_steps: nothing fails and nothing is saved. days: with saves and failures, where a
    mean time between failures was given. cost: of `gpu_hours`, in the price's currency.
    """

    tokens: float
    steps: int
    days_of_steps: float
    days: float
    gpu_hours: float
    cost: float | None
    reliability: Reliability | None


def economy(
    step_seconds: float,
    tokens_per_step: int,
    world: int,
    tokens: float,
    *,
    price_per_gpu_hour: float | None = None,
    mtbf_hours: float | None = None,
    checkpoint_bytes_per_rank: int = 0,
) -> Economy:
    """What the training of `tokens` takes on `world` GPUs.

    mtbf_hours: mean time between failures of one GPU with its share of host and network; the
    machine's is that over `world`. checkpoint_bytes_per_rank: that a rank writes, see
    `checkpoint_bytes_per_rank`.

    Raises ValueError: failures come too often for any progress to speak of.
    """
    steps = math.ceil(tokens / tokens_per_step)
    seconds = steps * step_seconds
    reliability, goodput = None, 1.0
    if mtbf_hours is not None:
        reliability = _reliability(
            step_seconds, world, mtbf_hours, checkpoint_bytes_per_rank, seconds
        )
        goodput = reliability.goodput
    days = seconds / goodput / DAY
    gpu_hours = days * DAY / HOUR * world
    return Economy(
        tokens=tokens,
        steps=steps,
        days_of_steps=seconds / DAY,
        days=days,
        gpu_hours=gpu_hours,
        cost=None if price_per_gpu_hour is None else gpu_hours * price_per_gpu_hour,
        reliability=reliability,
    )


def checkpoint_bytes_per_rank(memory: Memory, layout: Layout) -> int:
    """That the slowest rank writes: weights and optimizer state. Replicas share the writing."""
    most = max(rank.weights + rank.optimizer for rank in memory.ranks)
    return -(-most // layout.dp_replicate)


def expected_goodput(work: float, save: float, restart: float, mtbf: float) -> float:
    """Share of time that goes into work that lasts, saving after every `work`. All seconds.

    M·e^(R/M)·(e^((T+C)/M) - 1) is written with negative exponents alone, which cannot overflow.
    """
    segment = (work + save) / mtbf
    return work / mtbf * math.exp(-segment - restart / mtbf) / -math.expm1(-segment)


def best_interval(save: float, mtbf: float) -> float:
    """Seconds of work between saves where `expected_goodput` is highest; 0 where saving is free."""
    if save == 0.0:
        return 0.0
    low, high = 0.0, mtbf  # 1 - T/M - e^(-(T+C)/M) falls from above 0 to below 0 in between
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if -math.expm1(-(middle + save) / mtbf) > middle / mtbf:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _reliability(
    step_seconds: float, world: int, mtbf_hours: float, bytes_per_rank: int, seconds: float
) -> Reliability:
    mtbf = mtbf_hours * HOUR / world
    save = bytes_per_rank / (WRITE_GB_PER_SECOND_PER_GPU * GB)
    restart = REPLACE_SECONDS + bytes_per_rank / (READ_GB_PER_SECOND_PER_GPU * GB)

    def goodput_of(steps: int) -> float:
        return expected_goodput(steps * step_seconds, save, restart, mtbf)

    below = max(1, math.floor(best_interval(save, mtbf) / step_seconds))
    steps = max(below, below + 1, key=goodput_of)
    goodput = goodput_of(steps)
    if goodput < LEAST_GOODPUT:
        raise ValueError(
            f"{world} GPUs that each fail once in {mtbf_hours:g} hours stop every {mtbf:.3g} s on "
            f"average; a step takes {step_seconds:.3g} s, a save {save:.3g} s, a restart "
            f"{restart:.3g} s: next to nothing is left for training"
        )
    return Reliability(
        mtbf_hours_per_gpu=mtbf_hours,
        machine_mtbf_hours=mtbf / HOUR,
        save_seconds=save,
        restart_seconds=restart,
        interval_seconds=steps * step_seconds,
        interval_steps=steps,
        goodput=goodput,
        failures=seconds / goodput / mtbf,
        assumptions=(
            f"A GPU, with its share of host and network, fails once in {mtbf_hours:g} hours, at "
            f"random; {world} of them once in {mtbf / HOUR:.3g} hours, and then all stop.",
            f"A checkpoint is {bytes_per_rank / GB:.3g} GB per rank (weights and optimizer), "
            f"written at {WRITE_GB_PER_SECOND_PER_GPU:g} GB/s per GPU while training waits, and "
            f"read at {READ_GB_PER_SECOND_PER_GPU:g}.",
            f"{REPLACE_SECONDS / 60:g} minutes pass from a failure until all processes run again.",
        ),
    )
