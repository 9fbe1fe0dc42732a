"""A run held against its own plan, where its config names a machine ([plan] cluster)."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from titan_moe.config.sections import RunConfig

if TYPE_CHECKING:
    from titan_moe.planner.plan import Plan

logger = logging.getLogger(__name__)

GB, GIB = 1e9, 2**30


class RunPlan:
    """Told at start and at the end, by the one rank that `speaks`; the others keep silent.

    Memory is planned by formula: a trace would need a process group of its own. What goes wrong
    here is told on one line and stops nobody.
    """

    def __init__(self, config: RunConfig, world_size: int, *, device: str, speaks: bool) -> None:
        """device: name of what this rank computes on; "cpu" for none of any cluster's."""
        self._device = device
        self._plan: Plan | None = None
        if speaks and config.plan.cluster is not None:
            try:
                self._plan = plan_of(config, world_size)
            except Exception as error:  # a forecast must never cost the run that it is of
                logger.warning("no plan of this run: %s", _on_one_line(error))

    def announce(self) -> None:
        """What is to be expected, before the first step."""
        plan = self._plan
        if plan is None:
            return
        logger.info(
            "planned on %s: %.4g s per step (±%.0f%%), %.1f of %.1f GB on the fullest rank "
            "(by formula; balanced experts)",
            _place(plan),
            plan.time.seconds,
            100 * plan.time.error_band,
            plan.memory.worst.peak / GB,
            plan.memory.usable / GB,
        )
        if not plan.fits:
            logger.warning("the plan does not fit: %s", plan.advice)

    def compare(self, step_seconds: float | None, memory_gib: float) -> None:
        """After the last step. step_seconds: of a typical one; None: too few to tell.

        memory_gib: the most that this rank held at once; it is of the pipeline's first rank.
        """
        plan = self._plan
        if plan is None:
            return
        memory = f"memory {_against(plan.memory.ranks[0].peak / GB, memory_gib * GIB / GB, 'GB')}"
        step = "step unmeasured: too few were logged"
        if step_seconds is not None:
            step = f"step {_against(plan.time.seconds, step_seconds, 's')}"
        where = f"planned on {_place(plan)}, measured on {self._device}"
        caveat = "" if self._device != "cpu" else "; another machine: this says nothing of the plan"
        logger.info("plan against run: %s; %s (%s%s)", step, memory, where, caveat)


def plan_of(config: RunConfig, world_size: int) -> "Plan":
    """Of a run as its config has it, on the machine that it names, in milliseconds or seconds.

    Raises ValueError (or ConfigError, which is one): cluster or stack is wrong.
    """
    # Slow to import, and most runs name no machine.
    from titan_moe.planner.case import Case
    from titan_moe.planner.cluster import load_cluster
    from titan_moe.planner.plan import make_plan
    from titan_moe.planner.stack import load_stack

    assert config.plan.cluster is not None, "no machine is named"
    cluster = load_cluster(Path(config.plan.cluster))
    case = Case(config, world_size, cluster, load_stack(config.plan.stack))
    return make_plan(case, traced=False)


def _place(plan: "Plan") -> str:
    return f"{plan.case.world} × {plan.case.cluster.machine.name} under {plan.case.stack.name}"


def _against(planned: float, measured: float, unit: str) -> str:
    ratio = f"× {measured / planned:.3g}"
    return f"planned {planned:.4g} {unit}, measured {measured:.4g} {unit}, {ratio}"


def _on_one_line(error: Exception) -> str:
    return "; ".join(str(error).splitlines()) or type(error).__name__
