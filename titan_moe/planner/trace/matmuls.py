"""FLOPs of traced matmuls, from their shapes: 2·m·n·k each.

B batch, S queries, T keys, H heads, D width of queries and keys, V of values, R rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import titan_moe.layers.blocked
import titan_moe.layers.grouped
import titan_moe.planner.trace.kernels  # noqa: F401 (they define operators)

aten, ours = torch.ops.aten, torch.ops.titan_moe

FLOPS_PER_PRODUCT = 2
# Scores and their use, forward; backward forms the scores again, and four gradients.
FORWARD, BACKWARD = (1, 1), (3, 2)


def flops_of(operator: Any, args: Sequence[Any], result: Any) -> int:
    """0 of what is no matmul."""
    count = _COUNTS.get(operator)
    return 0 if count is None else FLOPS_PER_PRODUCT * count(args, result)


def _mm(args: Sequence[Any], result: Tensor) -> int:
    return result.numel() * int(args[0].shape[-1])


def _add_mm(args: Sequence[Any], result: Tensor) -> int:
    return result.numel() * int(args[1].shape[-1])


def _grouped(args: Sequence[Any], result: Tensor) -> int:
    """Rows once each; where both sides are rows, their outer products."""
    left, right = args[:2]
    if left.ndim == right.ndim == 2:
        return int(left.shape[1] * left.shape[0] * right.shape[1])
    return int(left.shape[0] * right.shape[-2] * right.shape[-1])


def _outer(args: Sequence[Any], result: Tensor) -> int:
    return int(args[0].shape[0] * args[0].shape[1] * args[1].shape[1])


def _pairs(batch: int, heads: int, queries: int, keys: int, window: int) -> int:
    """Of queries and keys that see each other, as `flops.py` has it: half of all if causal."""
    seen = keys / 2 if not 0 < window < keys else window - window**2 / (2 * keys)
    return int(batch * heads * queries * seen)


def _by_position(q: int, window: int | None, parts: tuple[int, int]) -> Callable[..., int]:
    """q_BSHD is argument q, followed by k and v; window the argument of that number."""

    def count(args: Sequence[Any], result: Any) -> int:
        q_BSHD, k_BTGD, v_BTGV = args[q : q + 3]
        batch, queries, heads, width = q_BSHD.shape
        span = (args[window] or 0) if window is not None else 0
        pairs = _pairs(batch, heads, queries, k_BTGD.shape[1], span)
        return pairs * (parts[0] * width + parts[1] * v_BTGV.shape[3])

    return count


def _by_head(q: int, parts: tuple[int, int]) -> Callable[..., int]:
    def count(args: Sequence[Any], result: Any) -> int:
        q_BHSD, k_BHTD, v_BHTV = args[q : q + 3]
        batch, heads, queries, width = q_BHSD.shape
        pairs = _pairs(batch, heads, queries, k_BHTD.shape[2], 0)
        return pairs * (parts[0] * width + parts[1] * v_BHTV.shape[3])

    return count


_ATTENTION: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _by_head(0, FORWARD),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _by_head(1, BACKWARD),
    ours.planned_flex.default: _by_position(0, 3, FORWARD),
    ours.planned_flex_backward.default: _by_position(1, 6, BACKWARD),
    ours.blocked_attention.default: _by_position(0, 5, FORWARD),
    ours.blocked_attention_backward.default: _by_position(1, 6, BACKWARD),
}
ATTENTION = frozenset(_ATTENTION)

_COUNTS: dict[Any, Callable[..., int]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _mm,
    aten.addmm.default: _add_mm,
    aten.baddbmm.default: _add_mm,
    aten._grouped_mm.default: _grouped,
    ours.grouped_mm.default: _grouped,
    ours.grouped_outer.default: _outer,
    **_ATTENTION,
}
