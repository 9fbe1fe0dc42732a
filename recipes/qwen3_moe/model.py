"""Qwen3-MoE's architecture (arXiv 2505.09388, section 2): heads normed one by one, experts only.

B batch, S sequence, D hidden.
"""

from torch import Tensor, nn

from titan_moe.layers.context import Context
from titan_moe.layers.decoder import Decoder
from titan_moe.layers.experts import Experts
from titan_moe.layers.grouped_query import GroupedQueryAttention
from titan_moe.layers.moe import MoE
from titan_moe.layers.norm import RMSNorm
from titan_moe.layers.rope import Rope
from titan_moe.layers.router import Router

from .config import Qwen3MoeConfig


class Block(nn.Module):
    """Pre-norm: attention, then experts."""

    def __init__(self, cfg: Qwen3MoeConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(cfg.hidden_size, eps=cfg.norm_eps)
        self.attention = GroupedQueryAttention(
            cfg.hidden_size,
            cfg.num_heads,
            cfg.num_kv_heads,
            cfg.head_dim,
            std=cfg.initializer_range,
            norm="head",
            norm_eps=cfg.norm_eps,
        )
        self.mlp_norm = RMSNorm(cfg.hidden_size, eps=cfg.norm_eps)
        self.moe = build_moe(cfg, layer)

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), context)
        return x_BSD + self.moe(self.mlp_norm(x_BSD), context.valid_BS)


def build_moe(cfg: Qwen3MoeConfig, layer: int) -> MoE:
    """The experts of block `layer`, with that layer's balance settings."""
    hidden, std = cfg.hidden_size, cfg.initializer_range
    router = Router(
        hidden,
        cfg.num_experts,
        cfg.top_k,
        score_function="softmax",
        normalize_weights=cfg.normalize_weights,
        route_scale=1.0,
        std=std,
    )
    experts = Experts(cfg.num_experts, hidden, cfg.moe_intermediate_size, std=std)
    return MoE(router, experts, None, balance=cfg.balance(layer))


class Model(Decoder):
    """Qwen3-MoE, or the part of it with blocks `layers`. See `Decoder`."""

    def __init__(
        self, cfg: Qwen3MoeConfig, *, layers: range, has_embedding: bool, has_head: bool
    ) -> None:
        rope = Rope(
            cfg.head_dim, cfg.rope_theta, cfg.max_seq_len, cfg.rope_scaling, layout="halves"
        )
        super().__init__(
            cfg,
            layers=layers,
            has_embedding=has_embedding,
            has_head=has_head,
            rope=rope,
            block=lambda layer: Block(cfg, layer),
        )
