"""GLM-4.5's architecture (arXiv 2508.06471, section 2.1): grouped-query attention of which half a
head has position, sigmoid routing, a shared expert.

B batch, S sequence, D hidden.
"""

from torch import Tensor, nn

from titan_moe.layers.context import Context
from titan_moe.layers.decoder import Decoder
from titan_moe.layers.experts import Experts
from titan_moe.layers.grouped_query import GroupedQueryAttention
from titan_moe.layers.mlp import SwiGLU
from titan_moe.layers.moe import MoE
from titan_moe.layers.mtp import PredictsAhead
from titan_moe.layers.norm import RMSNorm
from titan_moe.layers.rope import Rope
from titan_moe.layers.router import Router

from .config import Glm4MoeConfig


class Block(nn.Module):
    """Pre-norm: attention, then a dense MLP (`mlp`) or experts (`moe`)."""

    def __init__(self, cfg: Glm4MoeConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(cfg.hidden_size, eps=cfg.norm_eps)
        self.attention = GroupedQueryAttention(
            cfg.hidden_size,
            cfg.num_heads,
            cfg.num_kv_heads,
            cfg.head_dim,
            std=cfg.initializer_range,
            norm="head" if cfg.qk_norm else None,
            norm_eps=cfg.norm_eps,
            bias=True,
        )
        self.mlp_norm = RMSNorm(cfg.hidden_size, eps=cfg.norm_eps)
        self.is_moe = layer >= cfg.num_dense_layers
        if self.is_moe:
            self.moe = build_moe(cfg, layer)
        else:
            self.mlp = SwiGLU(cfg.hidden_size, cfg.intermediate_size, std=cfg.initializer_range)

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), context)
        normed_BSD = self.mlp_norm(x_BSD)
        if self.is_moe:
            return x_BSD + self.moe(normed_BSD, context.valid_BS)
        return x_BSD + self.mlp(normed_BSD)


class MtpBlock(PredictsAhead, Block):
    """A layer of multi-token prediction, with experts."""


def build_moe(cfg: Glm4MoeConfig, layer: int) -> MoE:
    """The experts of block `layer`, with that layer's balance settings."""
    hidden, inner, std = cfg.hidden_size, cfg.moe_intermediate_size, cfg.initializer_range
    router = Router(
        hidden,
        cfg.num_experts,
        cfg.top_k,
        score_function="sigmoid",
        normalize_weights=True,
        route_scale=cfg.route_scale,
        std=std,
    )
    experts = Experts(cfg.num_experts, hidden, inner, std=std)
    shared = SwiGLU(hidden, inner * cfg.num_shared_experts, std=std)
    return MoE(router, experts, shared, balance=cfg.balance(layer))


class Model(Decoder):
    """GLM-4.5, or the part of it with blocks `layers`. See `Decoder`."""

    def __init__(
        self, cfg: Glm4MoeConfig, *, layers: range, has_embedding: bool, has_head: bool
    ) -> None:
        rope = Rope(
            cfg.rotary_dim, cfg.rope_theta, cfg.max_seq_len, cfg.rope_scaling, layout="halves"
        )
        super().__init__(
            cfg,
            layers=layers,
            has_embedding=has_embedding,
            has_head=has_head,
            rope=rope,
            block=lambda layer: (Block if layer < cfg.num_layers else MtpBlock)(cfg, layer),
        )
