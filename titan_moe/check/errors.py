"""How far two sets of gradients are apart."""

import math
from collections.abc import Mapping

from torch import Tensor

from titan_moe.check.tolerances import NEGLIGIBLE_GRADIENT


def gradient_errors(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """‖Δ‖/‖reference‖ of each tensor of `wanted`, in fp64.

    A reference that is zero but for rounding, measured by the largest of them, is compared with
    that measure instead.
    """
    largest = max(gradient.double().norm().item() for gradient in wanted.values())
    least = NEGLIGIBLE_GRADIENT * largest
    return {
        name: (got[name].double() - gradient.double()).norm().item()
        / max(gradient.double().norm().item(), least, math.ulp(0.0))
        for name, gradient in wanted.items()
    }
