"""Routed experts: one layer's SwiGLU MLPs as stacked weights, over rows sorted by expert.

R rows, D hidden, F inner width of an expert, E experts.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.layers.grouped import grouped_mm
from titan_moe.layers.init import Init, Normal

Backend = Literal["grouped", "loop"]


ExpertsFunction = Callable[..., Tensor]
"""Called as `weighted_swiglu` is: all that experts compute with is given to it."""


def weighted_swiglu(
    rows_RD: Tensor,
    offsets_E: Tensor,
    row_weights_R: Tensor,
    gate_EDF: Tensor,
    up_EDF: Tensor,
    down_EFD: Tensor,
    *,
    backend: Backend,
) -> Tensor:
    """[R, D], fp32: each row's `down(silu(gate(x)) * up(x))` times its weight. See `Experts`."""
    if backend == "loop":
        outputs_RD = _loop(rows_RD, offsets_E, gate_EDF, up_EDF, down_EFD)
    else:
        gate_RF = grouped_mm(rows_RD, gate_EDF, offsets_E)
        up_RF = grouped_mm(rows_RD, up_EDF, offsets_E)
        outputs_RD = grouped_mm(F.silu(gate_RF) * up_RF, down_EFD, offsets_E)
    return outputs_RD.float() * row_weights_R[:, None]


class Experts(nn.Module):
    """gate, up: [E, D, F]; down: [E, F, D]. Expert e maps its rows by down(silu(gate(x))·up(x)).

    backend: "grouped", one grouped matmul per weight; "loop", expert by expert, the reference
        (reads the offsets on the host).

    Slot: compute, for another way to the same numbers.
    """

    inits: dict[str, Init]

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, *, std: float
    ) -> None:
        super().__init__()
        self.backend: Backend = "grouped"
        self.compute: ExpertsFunction = weighted_swiglu
        self.gate = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.up = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.down = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.inits = {name: Normal(std) for name in ("gate", "up", "down")}

    def forward(self, rows_RD: Tensor, offsets_E: Tensor, row_weights_R: Tensor) -> Tensor:
        """[R, D], fp32: each row's result times its weight, fp32.

        rows_RD, sorted by expert; offsets_E, int32: where each expert's rows end. The last must be
        R: rows past it would come back uninitialised.
        """
        weights = self.gate, self.up, self.down
        return self.compute(rows_RD, offsets_E, row_weights_R, *weights, backend=self.backend)


def _loop(
    rows_RD: Tensor, offsets_E: Tensor, gate_EDF: Tensor, up_EDF: Tensor, down_EFD: Tensor
) -> Tensor:
    outputs, start = [], 0
    for expert, stop in enumerate(offsets_E.tolist()):
        x_rD = rows_RD[start:stop]
        inner_rF = F.silu(x_rD @ gate_EDF[expert]) * (x_rD @ up_EDF[expert])
        outputs.append(inner_rF @ down_EFD[expert])
        start = stop
    return torch.cat(outputs)
