"""Grouped-query attention (arXiv 2305.13245), as most families have it.

B batch, S sequence (queries), T keys, D hidden, H query heads, G key heads, N width of a head.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from titan_moe.layers.attention import attention
from titan_moe.layers.context import Context
from titan_moe.layers.init import Constant, Init
from titan_moe.layers.linear import Linear
from titan_moe.layers.norm import RMSNorm


def keep_local(k_BSGN: Tensor, v_BSGN: Tensor) -> tuple[Tensor, Tensor]:
    """`gather_kv` where one process holds whole sequences."""
    return k_BSGN, v_BSGN


class GroupedQueryAttention(nn.Module):
    """Several query heads read one key head.

    Scores are divided by sqrt(N): where positions are stretched, temperatures are in the angles.

    norm: RMS norms of queries and keys before they are turned, by "head" (width N), or over the
        "whole" projection (widths H·N and G·N); None: none. norm_eps goes with it.
    bias, out_bias: of the projections to queries, keys and values, and of the one back.
    window: keys that a query sees at most, itself among them; None: all before it.
    sinks: each query head has a learned score that takes part in the softmax, and no value.

    Slots: backend (see `attention`); gather_kv(k_BSGN, v_BSGN) -> the same over T keys.
    """

    inits: dict[str, Init]

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        std: float,
        norm: Literal["head", "whole"] | None = None,
        norm_eps: float | None = None,
        bias: bool = False,
        out_bias: bool = False,
        window: int | None = None,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        self.backend = "auto"
        self.gather_kv: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = keep_local
        self.head_dim, self.scale = head_dim, head_dim**-0.5
        self.window, self.norm = window, norm
        queries, keys = num_heads * head_dim, num_kv_heads * head_dim
        self.q = Linear(hidden_size, queries, std=std, bias=bias)
        self.k = Linear(hidden_size, keys, std=std, bias=bias)
        self.v = Linear(hidden_size, keys, std=std, bias=bias)
        if norm:
            assert norm_eps is not None, "a norm needs its norm_eps"
            self.q_norm = RMSNorm(head_dim if norm == "head" else queries, eps=norm_eps)
            self.k_norm = RMSNorm(head_dim if norm == "head" else keys, eps=norm_eps)
        self.out = Linear(queries, hidden_size, std=std, bias=out_bias)
        self.sinks_H: nn.Parameter | None = None
        self.inits = {}
        if sinks:
            self.sinks_H = nn.Parameter(torch.empty(num_heads))
            self.inits["sinks_H"] = Constant(0.0)

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        q, k, v = self.q(x_BSD), self.k(x_BSD), self.v(x_BSD)
        if self.norm == "whole":
            q, k = self.q_norm(q), self.k_norm(k)
        # As many heads as the weights give: tensor parallelism leaves a rank some of them.
        q_BSHN, k_BSGN, v_BSGN = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if self.norm == "head":
            q_BSHN, k_BSGN = self.q_norm(q_BSHN), self.k_norm(k_BSGN)
        q_BSHN, k_BSGN = context.rotation(q_BSHN), context.rotation(k_BSGN)
        k_BTGN, v_BTGN = self.gather_kv(k_BSGN, v_BSGN)
        out_BSHN = attention(
            q_BSHN,
            k_BTGN,
            v_BTGN,
            scale=self.scale,
            mask=context.mask,
            window=self.window,
            sinks_H=self.sinks_H,
            backend=self.backend,
        )
        return self.out(out_BSHN.flatten(2))
