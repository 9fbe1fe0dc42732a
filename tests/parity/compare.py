"""How far a run is from the reference, and what of it is too far."""

import math
from dataclasses import dataclass

import torch

from tests.layers.helpers import error
from tests.parity.run import Trace, Values
from tests.tolerances import (
    PARITY_GRADIENT_ERROR,
    PARITY_LATER_GRADIENT_ERROR,
    PARITY_RTOL,
    PARITY_WEIGHT_ERROR,
)

CURVES = ("loss", "balance_loss", "norm", "mtp_loss")


@dataclass(frozen=True)
class Worst:
    """The largest error of a kind, and where it is."""

    error: float
    where: str


@dataclass(frozen=True)
class Comparison:
    """Of one rank's trace with the reference's.

    first, later: gradients, ‖Δ‖/‖reference‖ per parameter, of the first step and of those after.
    weights: at the end, the same way. curves: loss, balance loss, norm, validation; relative.
    faults: all that exceeds its tolerance, or should be equal to the bit and is not, in words.
    """

    first: Worst
    later: Worst
    weights: Worst
    curves: Worst
    faults: tuple[str, ...]


def compare(trace: Trace, expected: Trace) -> Comparison:
    gradients = [
        _errors(got, wanted)
        for got, wanted in zip(trace.gradients, expected.gradients, strict=True)
    ]
    later = {
        f"{name} in step {step}": error
        for step, errors in enumerate(gradients[1:], 1)
        for name, error in errors.items()
    }
    kinds = [
        ("gradient", gradients[0], PARITY_GRADIENT_ERROR),
        ("later gradient", later, PARITY_LATER_GRADIENT_ERROR),
        ("weight", _errors(trace.weights, expected.weights), PARITY_WEIGHT_ERROR),
        ("curve", _curve_errors(trace, expected), PARITY_RTOL),
    ]
    faults = [
        f"{kind} of {where}: {error:.1e}"
        for kind, errors, bound in kinds
        for where, error in errors.items()
        if not error <= bound  # nan is not within any
    ]
    faults += [f"not exact: {what}" for what in _inexact(trace, expected)]
    return Comparison(*(_worst(errors) for _, errors, _ in kinds), faults=tuple(faults))


def _errors(got: Values, wanted: Values) -> dict[str, float]:
    assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
    return {name: error(got[name], wanted[name]) for name in wanted}


def _curve_errors(trace: Trace, expected: Trace) -> dict[str, float]:
    pairs = [("validation", trace.validation, expected.validation)]
    for curve in CURVES:
        got, wanted = getattr(trace, curve), getattr(expected, curve)
        pairs += [(f"{curve}[{n}]", *pair) for n, pair in enumerate(zip(got, wanted, strict=True))]
    return {where: _relative(got, wanted) for where, got, wanted in pairs}


def _relative(got: float, wanted: float) -> float:
    """What is wanted to be 0 must be so exactly."""
    if wanted == 0.0:
        return 0.0 if got == 0.0 else math.inf
    return abs(got - wanted) / abs(wanted)


def _inexact(trace: Trace, expected: Trace) -> list[str]:
    faults = [
        f"counts of step {step}"
        for step, (got, wanted) in enumerate(zip(trace.counts, expected.counts, strict=True))
        if not torch.equal(got, wanted)
    ]
    if not torch.equal(trace.bias, expected.bias):
        faults.append("selection biases")
    return faults + [f"copies of {name}" for name in sorted(trace.drifted)]


def _worst(errors: dict[str, float]) -> Worst:
    """nan is the worst of all."""
    where = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]), default="")
    return Worst(errors.get(where, 0.0), where)
