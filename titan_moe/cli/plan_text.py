"""A plan for people, as text, and for scripts, as plain JSON types. Torch-free."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from titan_moe.config.topology import layout_line
from titan_moe.planner.figures import Lane, RankMemory

if TYPE_CHECKING:
    from titan_moe.planner.plan import Plan

GB = 1e9
PARTS = ("weights", "gradients", "optimizer", "activations", "buffers")
SCHEMA_VERSION = 1


def text_of(plan: "Plan") -> str:
    """A headline, memory by pipeline rank, traffic by mesh dimension, and what it rests on."""
    case, memory = plan.case, plan.memory
    lines = [
        f"{case.config.job.name} on {case.world} × {case.cluster.machine.name}: {headline(plan)}",
        layout_line(case.layout),
        "",
        *_table(
            ["pipeline rank", *PARTS, "peak GB", "when"],
            [_memory_row(rank) for rank in memory.ranks],
        ),
        "",
        *_traffic(plan.lanes),
        *(f"warning: {warning}" for warning in plan.warnings),
        *(f"assumed: {assumption}" for assumption in plan.assumptions),
        f"planned in {plan.planner_seconds:.0f} s, with {_gb(plan.planner_peak_bytes)} GB at most",
    ]
    return "\n".join(lines)


def headline(plan: "Plan") -> str:
    """Whether it fits, with the arithmetic."""
    memory, worst = plan.memory, plan.memory.worst
    sum_of = " + ".join(f"{part} {_gb(getattr(worst, part))}" for part in PARTS)
    where = f"pipeline rank {worst.pipeline_rank} needs {_gb(worst.peak)} GB ({sum_of})"
    if memory.fits:
        return f"fits; {where} of {_gb(memory.usable)}"
    short = _gb(worst.peak - memory.usable)
    return (
        f"does not fit; {where}, {short} more than the {_gb(memory.usable)} that tensors can have"
    )


def json_of(plan: "Plan") -> dict[str, Any]:
    """Stable names, with their units; schema_version changes when one changes its meaning."""
    case, memory = plan.case, plan.memory
    return {
        "schema_version": SCHEMA_VERSION,
        "job": case.config.job.name,
        "cluster": case.cluster.machine.name,
        "gpus": case.world,
        "layout": case.layout.dense | {"efsdp": case.layout.efsdp, "ep": case.layout.ep},
        "fits": memory.fits,
        "usable_bytes": memory.usable,
        "memory": [
            {"pipeline_rank": rank.pipeline_rank, "when": rank.when, "peak_bytes": rank.peak}
            | {f"{part}_bytes": getattr(rank, part) for part in PARTS}
            for rank in memory.ranks
        ],
        "traffic": [
            {
                "dimension": lane.dimension,
                "ranks": lane.ranks,
                "tier": lane.tier,
                "inside_bytes_per_step": lane.inside_bytes_per_step,
                "across_bytes_per_step": lane.across_bytes_per_step,
                "bytes_per_micro_batch": lane.bytes_per_micro_batch,
            }
            for lane in plan.lanes
        ],
        "warnings": list(plan.warnings),
        "assumptions": list(plan.assumptions),
        "planner_seconds": plan.planner_seconds,
        "planner_peak_bytes": plan.planner_peak_bytes,
    }


def _memory_row(rank: RankMemory) -> list[str]:
    parts = [_gb(getattr(rank, part)) for part in PARTS]
    return [str(rank.pipeline_rank), *parts, _gb(rank.peak), rank.when]


def _traffic(lanes: Sequence[Lane]) -> list[str]:
    if not lanes:
        return ["one rank: nothing is sent"]
    return [
        "GB that a rank sends to others, of the pipeline rank that sends most:",
        *_table(
            ["dimension", "ranks", "network", "per step", "of it across", "per micro-batch"],
            [
                [
                    lane.dimension,
                    str(lane.ranks),
                    lane.tier,
                    _gb(lane.inside_bytes_per_step + lane.across_bytes_per_step),
                    _gb(lane.across_bytes_per_step),
                    _gb(lane.bytes_per_micro_batch),
                ]
                for lane in lanes
            ],
        ),
        "",
    ]


def _gb(number: int) -> str:
    return f"{number / GB:.1f}" if number >= GB else f"{number / GB:.3g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they need, to the right."""
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
