"""What a plan takes for granted, in plain sentences: whoever reads its figures reads these too."""

from titan_moe.planner.case import Case
from titan_moe.planner.figures import Memory, StepTime
from titan_moe.planner.placement import domain_ranks
from titan_moe.planner.usable import RESERVE_SHARE

GB = 1e9
OWN_STACK = "titan-moe"
OWN_PRECISION = "bf16"


def assumptions(case: Case, memory: Memory, time: StepTime | None) -> tuple[str, ...]:
    """The weightiest first. time: None: times are not planned."""
    return (
        *_stack(case, time),
        *_precision(case),
        _balance(case),
        _memory(case, memory),
        *_ranks(case),
        "Not counted: waiting for data, validation, checkpoints, logging, slow or broken hardware.",
    )


def _stack(case: Case, time: StepTime | None) -> tuple[str, ...]:
    if time is None:
        return ("How long a step takes is not planned yet.",)
    band = f"±{100 * time.error_band:.0f}%"
    if case.stack.name == OWN_STACK:
        return (
            f"Times of {OWN_STACK} are an estimate until it is measured on GPUs; nine in ten "
            f"should be within {band}.",
        )
    return (
        f"Times are those of {case.stack.name}, whose published figures were within {band} in nine "
        f"of ten cases; {OWN_STACK} itself is not measured on GPUs.",
    )


def _precision(case: Case) -> tuple[str, ...]:
    if case.precision == OWN_PRECISION:
        return ()
    return (
        f"Matmuls with weights run in {case.precision}, which {OWN_STACK} does not do yet: today "
        f"a run of this config is in {OWN_PRECISION}.",
    )


def _balance(case: Case) -> str:
    if case.imbalance == 1.0:
        return (
            "Every rank's experts get the same number of tokens; a real router is never so even, "
            "least of all at first."
        )
    return f"The busiest rank's experts get {case.imbalance:g} times the mean number of tokens."


def _memory(case: Case, memory: Memory) -> str:
    how = (
        "traced through the code that will run"
        if memory.source == "traced"
        else "by a formula, which is held to a trace of the code"
    )
    return (
        f"Memory is {how}, of tensors alone, kernels' scratch left out; of "
        f"{case.cluster.gpu.memory_gb:g} GB tensors can have {memory.usable / GB:.1f}, as "
        f"{100 * RESERVE_SHARE:g}% is kept for CUDA, NCCL and fragmentation. It has not been held "
        f"against a run on GPUs."
    )


def _ranks(case: Case) -> tuple[str, ...]:
    domain = domain_ranks(case)
    if case.world <= domain:
        return ()
    return (f"Neighbouring ranks share fast domains of {domain} GPUs, filled in order of rank.",)
