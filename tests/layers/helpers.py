"""Values for modules built outside a run, and how far two tensors are apart."""

from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.layers.init import Computed, Constant, Normal


@torch.no_grad()
def fill(model: nn.Module, seed: int = 0) -> Any:
    """What `inits` says, in place; fails where a module does not state exactly what it owns."""
    generator = torch.Generator().manual_seed(seed)
    for name, module in model.named_modules():
        owned = dict(module.named_parameters(recurse=False))
        owned |= dict(module.named_buffers(recurse=False))
        inits = getattr(module, "inits", {})
        assert inits.keys() == owned.keys(), f"{name}: states {set(inits)}, owns {set(owned)}"
        for own, tensor in owned.items():
            match inits[own]:
                case Normal(std):
                    noise = torch.randn(tensor.shape, generator=generator)
                    tensor.copy_(noise * std)
                case Constant(value):
                    tensor.fill_(value)
                case Computed(fn):
                    tensor.copy_(fn())
    return model


def error(x: Tensor, reference: Tensor) -> float:
    """‖x − reference‖ / ‖reference‖ in fp64; a zero reference must be met exactly."""
    difference = (x.double() - reference.double()).norm().item()
    scale = reference.double().norm().item()
    if scale == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / scale
