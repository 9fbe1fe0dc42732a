"""Routed experts: one layer's gated MLPs as stacked weights, over rows sorted by expert.

R rows, D hidden, F inner width of an expert, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.layers.grouped import grouped_mm
from titan_moe.layers.init import Constant, Init, Normal

Backend = Literal["grouped", "loop"]

Activation = Callable[[Tensor, Tensor], Tensor]
"""activation(gate_RF, up_RF) -> what the way down gets, element by element, in their dtype."""

ExpertsFunction = Callable[..., Tensor]
"""Called as `weighted_mlp` is: all that experts compute with is given to it, tensors by place."""


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up (arXiv 2002.05202)."""
    return F.silu(gate) * up


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gate · sigmoid(alpha · gate) · (up + 1), after gate <= limit and -limit <= up <= limit.

    That of gpt-oss (arXiv 2508.10925), where alpha is 1.702 and limit 7.
    """

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


def weighted_mlp(
    rows_RD: Tensor,
    offsets_E: Tensor,
    row_weights_R: Tensor,
    gate_EDF: Tensor,
    up_EDF: Tensor,
    down_EFD: Tensor,
    gate_bias_EF: Tensor | None = None,
    up_bias_EF: Tensor | None = None,
    down_bias_ED: Tensor | None = None,
    *,
    activation: Activation,
    backend: Backend,
) -> Tensor:
    """[R, D], fp32: each row's `down(activation(gate(x), up(x)))` times its weight.

    See `Experts`; biases are there all or none.
    """
    project = _loop if backend == "loop" else _grouped
    gate_RF = project(rows_RD, gate_EDF, gate_bias_EF, offsets_E)
    up_RF = project(rows_RD, up_EDF, up_bias_EF, offsets_E)
    outputs_RD = project(activation(gate_RF, up_RF), down_EFD, down_bias_ED, offsets_E)
    return outputs_RD.float() * row_weights_R[:, None]


class Experts(nn.Module):
    """gate, up: [E, D, F]; down: [E, F, D]. Expert e maps its rows by down(activation(gate, up)).

    bias: each of the three adds one, gate_bias and up_bias [E, F], down_bias [E, D].
    backend: "grouped", one grouped matmul per weight; "loop", expert by expert, the reference
        (reads the offsets on the host).

    Slot: compute, for another way to the same numbers.
    """

    inits: dict[str, Init]

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        std: float,
        bias: bool = False,
        activation: Activation = swiglu,
    ) -> None:
        super().__init__()
        self.backend: Backend = "grouped"
        self.compute: ExpertsFunction = weighted_mlp
        self.activation = activation
        self.gate = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.up = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.down = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.inits = {name: Normal(std) for name in ("gate", "up", "down")}
        self.has_bias = bias
        if bias:
            self.gate_bias = nn.Parameter(torch.empty(num_experts, intermediate_size))
            self.up_bias = nn.Parameter(torch.empty(num_experts, intermediate_size))
            self.down_bias = nn.Parameter(torch.empty(num_experts, hidden_size))
            self.inits |= {name: Constant(0.0) for name in ("gate_bias", "up_bias", "down_bias")}

    def forward(self, rows_RD: Tensor, offsets_E: Tensor, row_weights_R: Tensor) -> Tensor:
        """[R, D], fp32: each row's result times its weight, fp32.

        rows_RD, sorted by expert; offsets_E, int32: where each expert's rows end. The last must be
        R: rows past it would come back uninitialised.
        """
        weights = [self.gate, self.up, self.down]
        if self.has_bias:
            weights += [self.gate_bias, self.up_bias, self.down_bias]
        return self.compute(
            rows_RD,
            offsets_E,
            row_weights_R,
            *weights,
            activation=self.activation,
            backend=self.backend,
        )


def _grouped(
    rows_RD: Tensor, weights_EDF: Tensor, bias_EF: Tensor | None, offsets_E: Tensor
) -> Tensor:
    out_RF = grouped_mm(rows_RD, weights_EDF, offsets_E)
    if bias_EF is None:
        return out_RF
    # As one more input that is always 1: exact, and the gradient is a sum over rows in the
    # accumulator's precision and in one order. An index_select's would be added up in bf16.
    ones_R1 = rows_RD.new_ones(len(rows_RD), 1)
    return out_RF + grouped_mm(ones_R1, bias_EF.unsqueeze(1), offsets_E)


def _loop(
    rows_RD: Tensor, weights_EDF: Tensor, bias_EF: Tensor | None, offsets_E: Tensor
) -> Tensor:
    outputs, start = [], 0
    for expert, stop in enumerate(offsets_E.tolist()):
        out_rF = rows_RD[start:stop] @ weights_EDF[expert]
        outputs.append(out_rF if bias_EF is None else out_rF + bias_EF[expert])
        start = stop
    return torch.cat(outputs)
