"""How evenly the experts are used.

Shape suffixes: L MoE layers, E experts.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertBalance:
    """One step's balance over all MoE layers that tokens reached; None where there is none.

    (None reaches a layer of multi-token prediction in a step whose documents are all too short.)

    max_violation: the busiest expert's load over the mean load, minus 1; the worst layer's
        (MaxVio of arXiv 2408.15664). 0 is perfect balance.
    dead_experts: experts that no token reached, of all layers.
    entropy: entropy of the load over log E, mean over layers. 1 is perfect balance.
    bias_range: largest minus smallest selection bias of a layer; the widest layer's.
    """

    max_violation: float | None = None
    dead_experts: int | None = None
    entropy: float | None = None
    bias_range: float | None = None


def expert_balance(counts_LE: Tensor | None, biases_LE: Tensor | None = None) -> ExpertBalance:
    """Summarise a step's routing.

    counts_LE: int64, tokens that each expert received in the whole global step.
    biases_LE: the selection biases, where the router has them.
    """
    bias_range = None
    if biases_LE is not None and biases_LE.numel():
        bias_range = float((biases_LE.amax(-1) - biases_LE.amin(-1)).max())
    if counts_LE is None or not counts_LE.numel():
        return ExpertBalance(bias_range=bias_range)
    counts_LE = counts_LE[counts_LE.sum(-1) > 0]
    if not len(counts_LE):
        return ExpertBalance(bias_range=bias_range)
    dead_experts = int((counts_LE == 0).sum())
    routed_L1 = counts_LE.sum(-1, keepdim=True)
    num_experts = counts_LE.shape[-1]
    load_LE = counts_LE.double() * num_experts / routed_L1  # in units of the mean load
    entropy_L = torch.special.entr(load_LE / num_experts).sum(-1)
    return ExpertBalance(
        max_violation=float(load_LE.max()) - 1.0,
        dead_experts=dead_experts,
        entropy=float(entropy_L.mean()) / math.log(num_experts) if num_experts > 1 else 1.0,
        bias_range=bias_range,
    )
