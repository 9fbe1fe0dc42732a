"""A plan: all that is known of a run before it is started, and what that knowledge rests on."""

import time
from dataclasses import dataclass
from typing import Any

from titan_moe.planner.assumptions import assumptions
from titan_moe.planner.case import Case
from titan_moe.planner.figures import Lane, Memory, StepTime
from titan_moe.planner.trace import trace
from titan_moe.planner.traffic import lanes, warnings


@dataclass(frozen=True)
class Plan:
    """lanes: traffic, a mesh dimension each. warnings, assumptions: plain sentences.

    time: None: not planned. economy: None: nobody asked what the whole training takes. imbalance:
    None: nobody asked. advice: how much does not fit, and what would help; None: it fits.
    planner_peak_bytes: of making this plan, its other processes included.
    """

    case: Case
    memory: Memory
    lanes: tuple[Lane, ...]
    time: StepTime | None
    warnings: tuple[str, ...]
    assumptions: tuple[str, ...]
    economy: Any
    imbalance: Any
    advice: str | None
    planner_seconds: float
    planner_peak_bytes: int

    @property
    def fits(self) -> bool:
        return self.memory.fits


def make_plan(case: Case) -> Plan:
    """Trace the run's own code as each pipeline rank runs it; nothing is allocated.

    Raises ValueError: what `parallelize` raises for a layout that the model cannot have.
    """
    begin = time.monotonic()
    traced = trace(case)
    traffic = lanes(case, traced.messages)
    return Plan(
        case=case,
        memory=traced.memory,
        lanes=traffic,
        time=None,
        warnings=warnings(case, traffic),
        assumptions=assumptions(case, traced.memory, None),
        economy=None,
        imbalance=None,
        advice=None,
        planner_seconds=time.monotonic() - begin,
        planner_peak_bytes=traced.peak_bytes,
    )
