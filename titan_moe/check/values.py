"""Values that leave nothing trivial, and which experts tokens choose with them.

T tokens, K experts chosen per token.
"""

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.layers.init import Computed, Constant, Init
from titan_moe.layers.moe import MoE
from titan_moe.parallel.counter_normal import Stream
from titan_moe.parallel.initialise import initialise, unwrapped
from titan_moe.parallel.whole import Batch, keywords_of
from titan_moe.recipe import fits

DEVIATION = 0.3  # of what begins as a constant: norms, biases, sinks


def stir(model: nn.Module, seed: int, keep: Sequence[str] = ()) -> None:
    """Fill the model, or a rank's share of it, so that no parameter is 0, 1 or tiny, in place.

    What begins as a constant varies around it: a bias or a norm that is left out shows. Matrices
    keep the size of what they are applied to, so that logits and gradients are of order 1.

    keep: patterns of names that stay at their first value.
    """
    for prefix, module in model.named_modules():
        inits: dict[str, Init] = getattr(module, "inits", {})
        module.inits = dict(inits)  # type: ignore[assignment]
        lasting = module._buffers.keys() - module._non_persistent_buffers_set
        for key in (*module._parameters, *lasting):
            name = unwrapped(f"{prefix}.{key}" if prefix else key)
            tensor = getattr(module, key)
            if tensor is None or not tensor.is_floating_point() or fits(name, keep):
                continue
            if key in inits:  # a missing one is for `initialise` to tell
                value = partial(_value, seed, name, tensor.shape, inits[key])
                module.inits[key] = Computed(value)  # type: ignore[index, operator]
    initialise(model, seed)


def _value(seed: int, name: str, shape: torch.Size, first: Init) -> Tensor:
    noise = Stream.of(seed, name).normal(torch.arange(math.prod(shape))).view(shape)
    if isinstance(first, Constant):
        return first.value + DEVIATION * noise
    inputs = shape[-2] if len(shape) == 3 else shape[-1]  # stacked experts are [E, in, out]
    return noise / math.sqrt(inputs)


@torch.no_grad()
def moved(model: nn.Module, share: float, seed: int) -> nn.Module:
    """A copy whose parameters are off by about that share of themselves."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in other.parameters():
        parameter.mul_(1 + share * torch.randn(parameter.shape, generator=generator))
    return other


@torch.no_grad()
def choices_of(model: nn.Module, batch: Batch) -> list[list[list[int]]]:
    """For each MoE layer and token the experts chosen, sorted."""
    seen: list[list[list[int]]] = []
    for module in model.modules():
        if isinstance(module, MoE):
            module.dispatcher = _Watched(module.dispatcher, seen)
    model(batch["tokens"], **keywords_of(batch))
    for module in model.modules():
        if isinstance(module, MoE) and isinstance(module.dispatcher, _Watched):
            module.dispatcher = module.dispatcher.within
    return seen


class _Watched:
    """A dispatcher that notes who is sent where."""

    def __init__(self, within: Any, seen: list[list[list[int]]]) -> None:
        self.within, self.seen = within, seen

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Any:
        self.seen.append(expert_ids_TK.sort(dim=-1).values.tolist())
        return self.within.dispatch(x_TD, expert_ids_TK, weights_TK)

    def combine(self, weighted_rows_RD: Tensor, handle: Any) -> Tensor:
        out_TD: Tensor = self.within.combine(weighted_rows_RD, handle)
        return out_TD
