"""Same recipe, same loss, any layout: each way to lay the work against one process by the book."""

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.parity.reference import Reference
from tests.parity.tiny import STEPS, Case, Trace, train
from tests.pool import Pool
from tests.tolerances import PARITY_CURVE_RTOL, PARITY_GRADIENT_ERROR, PARITY_MIN_GAP

SEED = 2  # one of the seeds on which no choice of experts is nearly a tie

CASES = [
    Case(),
    Case(accumulation=4),
    Case(recompute="full", accumulation=4),
    Case(shards=2),
    Case(shards=2, accumulation=4, recompute="full"),
    Case(shards=4),
    Case(shards=4, accumulation=4),
    Case(shards=4, recompute="full", reshard="never"),
    Case(shards=2, replicas=2),
    Case(shards=2, replicas=2, accumulation=4, recompute="full"),
    Case(replicas=4),
    Case(replicas=4, accumulation=4),
]


@cache
def reference() -> Trace:
    run = Reference(SEED)
    trace = run.train()
    assert run.gap >= PARITY_MIN_GAP, f"seed {SEED} nearly ties: {run.gap:.1e}; take another"
    return trace


def gradient_errors(trace: Trace, expected: dict[str, Tensor]) -> dict[str, float]:
    """By name ‖Δ‖/‖reference‖; inf where the reference is zero and the gradient is not."""
    assert trace.gradients.keys() == expected.keys()
    errors = {}
    for name, gradient in expected.items():
        difference, size = (trace.gradients[name] - gradient).norm(), gradient.norm()
        if size == 0.0:
            errors[name] = 0.0 if difference == 0.0 else math.inf
        else:
            errors[name] = float(difference / size)
    return errors


def assert_parity(trace: Trace, expected: Trace) -> None:
    errors = gradient_errors(trace, expected.gradients)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= PARITY_GRADIENT_ERROR, f"{worst}: {errors[worst]:.1e}"
    for curve in ("loss", "balance_loss", "norm"):
        got, wanted = getattr(trace, curve), getattr(expected, curve)
        assert got == pytest.approx(wanted, rel=PARITY_CURVE_RTOL), curve
    for step, (got, wanted) in enumerate(zip(trace.counts, expected.counts, strict=True)):
        assert torch.equal(got, wanted), f"counts of step {step}"
    assert torch.equal(trace.bias, expected.bias)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_twenty_steps_equal_one_process(pool: Pool, case: Case) -> None:
    expected = reference()
    for trace in pool.run(case.world, train, case, SEED):
        assert len(trace.loss) == STEPS
        assert_parity(trace, expected)
