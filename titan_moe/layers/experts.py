"""Routed experts: one layer's SwiGLU MLPs as stacked weights, over rows sorted by expert.

R rows, D hidden, F inner width of an expert, E experts.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.layers.grouped import grouped_mm
from titan_moe.layers.init import Init, Normal


class Experts(nn.Module):
    """gate, up: [E, D, F]; down: [E, F, D]. Expert e maps its rows by down(silu(gate(x))·up(x)).

    backend: "grouped", one grouped matmul per weight; "loop", expert by expert, the reference
        (reads the offsets on the host).
    """

    inits: dict[str, Init]

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, *, std: float
    ) -> None:
        super().__init__()
        self.backend: Literal["grouped", "loop"] = "grouped"
        self.gate = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.up = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.down = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.inits = {name: Normal(std) for name in ("gate", "up", "down")}

    def forward(self, rows_RD: Tensor, offsets_E: Tensor, row_weights_R: Tensor) -> Tensor:
        """[R, D], fp32: each row's result times its weight, fp32.

        rows_RD, sorted by expert; offsets_E, int32: where each expert's rows end. The last must be
        R: rows past it would come back uninitialised.
        """
        outputs_RD = self._outputs(rows_RD, offsets_E)
        return outputs_RD.float() * row_weights_R[:, None]

    def _outputs(self, rows_RD: Tensor, offsets_E: Tensor) -> Tensor:
        if self.backend == "loop":
            return self._loop(rows_RD, offsets_E)
        gate_RF = grouped_mm(rows_RD, self.gate, offsets_E)
        up_RF = grouped_mm(rows_RD, self.up, offsets_E)
        return grouped_mm(F.silu(gate_RF) * up_RF, self.down, offsets_E)

    def _loop(self, rows_RD: Tensor, offsets_E: Tensor) -> Tensor:
        outputs, start = [], 0
        for expert, stop in enumerate(offsets_E.tolist()):
            x_rD = rows_RD[start:stop]
            inner_rF = F.silu(x_rD @ self.gate[expert]) * (x_rD @ self.up[expert])
            outputs.append(inner_rF @ self.down[expert])
            start = stop
        return torch.cat(outputs)
