"""Same recipe, same loss, any layout: each way to lay the work against one process by the book."""

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.parity.reference import Reference
from tests.parity.tiny import STEPS, Case, Trace, build, train, whole
from tests.pool import Pool
from tests.tolerances import PARITY_CURVE_RTOL, PARITY_GRADIENT_ERROR, PARITY_MIN_GAP
from titan_moe.parallel.engine import Engine

SEED = 0  # one of the seeds on which no choice of experts is nearly a tie

CASES = [
    Case(),
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


def initial_values(case: Case) -> dict[str, Tensor]:
    engine, _ = build(case, SEED)
    model = engine.parts[0]
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: whole(tensor) for name, tensor in named.items()}


@pytest.mark.parametrize(
    "case", [Case(), Case(shards=2), Case(shards=4), Case(shards=2, replicas=2)], ids=str
)
def test_initial_values_are_the_same_bits(pool: Pool, case: Case) -> None:
    """Memory was poisoned with NaN before it was initialised: none is left."""
    model = Reference(SEED).model
    expected = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for values in pool.run(case.world, initial_values, case):
        assert values.keys() == expected.keys()
        for name, value in values.items():
            assert torch.equal(value, expected[name]), name
            assert not value.isnan().any(), name


def average_one_unit(engine: Engine) -> None:
    """FSDP's default, on one of the ten modules."""
    experts = engine.parts[0].get_submodule("layers.1.moe.experts")
    for group in experts._get_fsdp_state()._fsdp_param_groups:
        group.gradient_divide_factor, group.force_sum_reduction_for_comms = 2.0, True


def divide_by_own_tokens(engine: Engine) -> None:
    engine._sum_over_rows = lambda *numbers: [int(number) for number in numbers]


def scale_balance_by_own_sequences(engine: Engine) -> None:
    """The balance gradient then grows with the number of ranks."""
    over_ranks = engine._sum_over_rows
    engine._sum_over_rows = lambda tokens, rows: [over_ranks(tokens, rows)[0], int(rows)]


def count_own_tokens(engine: Engine) -> None:
    """The selection bias then follows each rank's own tokens."""

    def of_own(own: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        return torch.stack(list(own.values()))

    engine._over_layers = of_own


@pytest.mark.parametrize(
    ("case", "break_it"),
    [
        (Case(shards=2), average_one_unit),
        (Case(shards=2), divide_by_own_tokens),
        (Case(shards=2), scale_balance_by_own_sequences),
        (Case(replicas=2, accumulation=4), average_one_unit),
        (Case(shards=2), count_own_tokens),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_broken_controls_are_seen(
    pool: Pool, case: Case, break_it: Callable[[Engine], None]
) -> None:
    expected = reference()
    first = Trace(
        expected.loss[:1],
        expected.balance_loss[:1],
        expected.norm[:1],
        expected.counts[:1],
        expected.gradients,
    )
    for trace in pool.run(case.world, train, case, SEED, 1, break_it):
        first.bias = trace.bias
        with pytest.raises(AssertionError):
            assert_parity(trace, first)
