"""AdamW over every part of the model that this rank holds."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from titan_moe.config.sections import Optimizer

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import AdamW


def build_optimizer(parts: Iterable["nn.Module"], section: Optimizer) -> "AdamW":
    """AdamW in two groups: weights that multiply what comes in decay, all others never do.

    Matrices, stacked expert weights, embedding and output decay; norms, scores of sinks and biases
    do not, those of experts ([E, width]) included. The selection bias is a buffer, so no optimizer
    sees it. Each group lists its names under "param_names", in the order of "params", so that state
    can be kept by parameter name. A weight that two parts hold is there twice: with equal
    gradients, the copies stay equal.
    """
    from torch.optim import AdamW  # here, so that the schedule next door stays free of torch

    named = [entry for part in parts for entry in part.named_parameters()]
    decayed = [(name, p) for name, p in named if _decays(name, p)]
    others = [(name, p) for name, p in named if not _decays(name, p)]
    groups = [
        {"params": members, "weight_decay": weight_decay}
        for members, weight_decay in ((decayed, section.weight_decay), (others, 0.0))
        if members
    ]
    return AdamW(
        groups,
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        fused=section.implementation == "fused",
        foreach=section.implementation == "foreach",
    )


def _decays(name: str, parameter: "nn.Parameter") -> bool:
    """Biases are known by name: experts' are stacked, so dimensions do not tell."""
    return parameter.ndim >= 2 and not name.endswith("bias")
