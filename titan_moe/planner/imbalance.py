"""What a router that is not balanced costs: memory and time by the load of the hottest rank.

Load: rows that reach the experts of one expert-parallel rank, over the mean of all of them. A token
goes to top_k different experts, and a rank has E / ep of them, so that no rank can get more than
min(ep, E / top_k) times the mean.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from titan_moe.planner.case import Case
from titan_moe.planner.figures import Memory, StepTime

LOADS = (1.0, 1.5, 3.0)
CLOSE_ENOUGH = 0.01  # of the load at which memory ends
GB = 1e9


@dataclass(frozen=True)
class ImbalanceRow:
    """imbalance: load of the hottest rank over the mean."""

    imbalance: float
    memory: Memory
    time: StepTime

    @property
    def fits(self) -> bool:
        return self.memory.fits


@dataclass(frozen=True)
class ImbalanceTable:
    """bound: the highest load that there can be. limit: the highest that fits, to `CLOSE_ENOUGH`;
    None: not even balanced experts do, or all loads up to `bound` do.
    """

    rows: tuple[ImbalanceRow, ...]
    limit: float | None
    bound: float

    @property
    def limit_text(self) -> str:
        """For people, a sentence."""
        if self.bound == 1.0:
            return "Every rank has all experts: an uneven router changes neither memory nor time."
        if not self.rows[0].fits:
            return "It does not fit even with balanced experts."
        if self.limit is None:
            return (
                f"Memory never runs out: it fits with the highest load there can be, "
                f"{self.bound:.3g} times the mean."
            )
        return f"Memory runs out where the hottest rank gets {self.limit:.2f} times the mean load."


def imbalance_table(
    case: Case, memory_of: Callable[[Case], Memory], time_of: Callable[[Case], StepTime]
) -> ImbalanceTable:
    """Rows at `LOADS`, as far as there can be such loads, and where memory ends.

    memory_of, time_of: of a case, whose `imbalance` they follow; memory must not fall as it rises.
    Raises as they do.
    """
    bound = highest_load(case)
    rows = tuple(
        ImbalanceRow(load, memory_of(of_load), time_of(of_load))
        for load in sorted({min(load, bound) for load in LOADS})
        for of_load in [replace(case, imbalance=load)]
    )
    return ImbalanceTable(rows, _limit(case, memory_of, rows, bound), bound)


def highest_load(case: Case) -> float:
    """All tokens to one rank, or to as many as their top_k experts are on: min(ep, E / top_k)."""
    cfg = case.config.model
    return min(float(case.layout.ep), cfg.num_experts / cfg.top_k)


def _limit(
    case: Case, memory_of: Callable[[Case], Memory], rows: Sequence[ImbalanceRow], bound: float
) -> float | None:
    """Between two loads memory is nearly a straight line, or several: the line's crossing is tried
    first, the middle next, in turn."""

    def spare_bytes(memory: Memory) -> float:
        return memory.usable - memory.worst.peak

    known = [(row.imbalance, spare_bytes(row.memory)) for row in rows]
    if known[-1][1] >= 0 and known[-1][0] < bound:
        known.append((bound, spare_bytes(memory_of(replace(case, imbalance=bound)))))
    if known[0][1] < 0 or known[-1][1] >= 0:
        return None
    low, low_spare = max(point for point in known if point[1] >= 0)
    high, high_spare = min(point for point in known if point[1] < 0)
    by_line = True
    while high - low > CLOSE_ENOUGH:
        line = low + (high - low) * low_spare / (low_spare - high_spare)
        load = line if by_line else (low + high) / 2
        # Off the ends, so that each try narrows the span.
        load = min(max(load, low + CLOSE_ENOUGH / 2), high - CLOSE_ENOUGH / 2)
        spare = spare_bytes(memory_of(replace(case, imbalance=load)))
        if spare >= 0:
            low, low_spare = load, spare
        else:
            high, high_spare = load, spare
        by_line = not by_line
    return low
