"""How each parameter and buffer starts out. Layers state it; whoever materialises them does it.

Every module that owns parameters or buffers directly has an attribute `inits`, a dict from each
of their own names (buffers that are not saved included) to an `Init`. Nothing here draws numbers:
a model is built on meta, sharded, materialised, and only then filled, so that a value depends on
the seed, the parameter's full name and the element's global index alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Normal:
    """Gaussian with mean 0 and standard deviation `std`."""

    std: float


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float


@dataclass(frozen=True)
class Computed:
    """A whole tensor made by `fn()`, for tables that are the same on every rank."""

    fn: Callable[[], Tensor]


Init = Normal | Constant | Computed
