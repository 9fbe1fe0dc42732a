"""A plan: all that is known of a run before it is started, and what that knowledge rests on."""

from dataclasses import dataclass
from typing import Any

from titan_moe.planner.case import Case
from titan_moe.planner.figures import Lane, Memory, StepTime


@dataclass(frozen=True)
class Plan:
    """lanes: traffic, a mesh dimension each. warnings, assumptions: plain sentences.

    economy: None: nobody asked what the whole training takes. imbalance: empty: nobody asked.
    advice: how much does not fit, and what would help; None: it fits.
    planner_peak_bytes: of making this plan, its other processes included.
    """

    case: Case
    memory: Memory
    lanes: tuple[Lane, ...]
    time: StepTime
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
