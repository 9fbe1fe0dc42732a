"""Attention as it costs memory on a GPU, for tensors that have shapes alone.

torch's fused kernel is traced as it is: on CPU tensors its CPU form saves the same as any GPU's,
q, k, v, out and the log of each query's sum. FlexAttention, which a CPU cannot trace, has a
stand-in that saves those too.

B batch, S queries, T keys, H query heads, G key heads, D width of queries and keys, V of values.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.layers.attention import attention, backend_for
from titan_moe.layers.mask import AttentionMask


def use_gpu_kernels(parts: Iterable[nn.Module]) -> None:
    """In place, in every attention that leaves the choice to the device."""
    for part in parts:
        for module in part.modules():
            if hasattr(module, "gather_kv") and module.backend in ("auto", "flex"):
                setattr(module, "backend", gpu_kernel)  # noqa: B010


def gpu_kernel(
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    scale: float,
    mask: AttentionMask | None,
    window: int | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """What "auto" is on CUDA: see `attention`."""
    if backend_for("cuda", mask, window, sinks_H) == "sdpa":
        return attention(q_BSHD, k_BTGD, v_BTGV, scale=scale, mask=mask, backend="sdpa")
    out_BSHV, lse_BHS = flex(q_BSHD, k_BTGD, v_BTGV, window or 0)
    if sinks_H is None:
        return out_BSHV
    share_BHS = torch.sigmoid(lse_BHS - sinks_H.float()[:, None])
    return (out_BSHV * share_BHS.transpose(1, 2)[..., None]).to(out_BSHV.dtype)


@torch.library.custom_op("titan_moe::planned_flex", mutates_args=())
def flex(q_BSHD: Tensor, k_BTGD: Tensor, v_BTGV: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """-> out_BSHV, lse_BHS. window: 0: none."""
    raise AssertionError("it has no values to compute with")


@torch.library.custom_op("titan_moe::planned_flex_backward", mutates_args=())
def flex_backward(
    grad_BSHV: Tensor,
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    out_BSHV: Tensor,
    lse_BHS: Tensor,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    raise AssertionError("it has no values to compute with")


@flex.register_fake
def _(q_BSHD: Tensor, k_BTGD: Tensor, v_BTGV: Tensor, window: int) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _ = q_BSHD.shape
    out_BSHV = q_BSHD.new_empty(batch, queries, heads, v_BTGV.shape[3])
    return out_BSHV, q_BSHD.new_empty(batch, heads, queries, dtype=torch.float32)


@flex_backward.register_fake
def _(
    grad_BSHV: Tensor,
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    out_BSHV: Tensor,
    lse_BHS: Tensor,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_BSHD), torch.empty_like(k_BTGD), torch.empty_like(v_BTGV)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_BSHD, k_BTGD, v_BTGV, ctx.window = inputs
    ctx.save_for_backward(q_BSHD, k_BTGD, v_BTGV, *output)


def _differentiate(ctx: Any, grad_BSHV: Tensor, grad_BHS: Tensor | None) -> tuple[Any, ...]:
    return *flex_backward(grad_BSHV, *ctx.saved_tensors, ctx.window), None


flex.register_autograd(_differentiate, setup_context=_save)
