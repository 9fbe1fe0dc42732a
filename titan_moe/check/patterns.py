"""What in a sharding looks like a slip, for whoever has to find one."""

from collections.abc import Iterator

from torch import nn

from titan_moe.layers.linear import Linear
from titan_moe.recipe import Sharding, fits

KINDS = ("colwise", "rowwise", "gather_inputs", "gather_outputs", "residual")


def suspicious_patterns(sharding: Sharding, model: nn.Module) -> list[str]:
    """Patterns that match no module of `model` (some variants of a family may lack it), and linears
    of a split parent that no pattern names."""
    return [*_without_module(sharding, model), *_without_pattern(sharding, model)]


def _without_module(sharding: Sharding, model: nn.Module) -> Iterator[str]:
    names = [name for name, _ in model.named_modules()]
    for kind in KINDS:
        for pattern in getattr(sharding, kind):
            if not any(fits(name, [pattern]) for name in names):
                yield f"{kind} {pattern!r} matches no module of this model"


def _without_pattern(sharding: Sharding, model: nn.Module) -> Iterator[str]:
    every = [pattern for kind in KINDS for pattern in getattr(sharding, kind)]
    names = {name: module for name, module in model.named_modules() if name}
    split = {name.rpartition(".")[0] for name in names if fits(name, sharding.rowwise)}
    told = set()
    for name, module in names.items():
        parent = name.rpartition(".")[0]
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        if isinstance(module, Linear) and parent in split and not fits(name, every):
            told.add(f"no pattern names {pattern}, a linear of a parent that is split")
    yield from sorted(told)
