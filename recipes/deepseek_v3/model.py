"""DeepSeek-V3's architecture (arXiv 2412.19437, section 2.1): latent attention and sparse experts.

B batch, S sequence (queries), T keys, D hidden, H heads, C latent of keys and values, R rotary
width, N width of queries and keys without position, V value width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from titan_moe.layers.attention import attention
from titan_moe.layers.context import Context
from titan_moe.layers.decoder import Decoder
from titan_moe.layers.experts import Experts
from titan_moe.layers.linear import Linear
from titan_moe.layers.mlp import SwiGLU
from titan_moe.layers.moe import MoE
from titan_moe.layers.mtp import PredictsAhead
from titan_moe.layers.norm import RMSNorm
from titan_moe.layers.rope import Rope
from titan_moe.layers.router import Router

from .config import DeepseekV3Config


def keep_local(latent_BSC: Tensor, k_rope_BSR: Tensor) -> tuple[Tensor, Tensor]:
    """`gather_kv` where one process holds whole sequences."""
    return latent_BSC, k_rope_BSR


class LatentAttention(nn.Module):
    """Keys and values are expanded from a small latent; one rotary key serves all heads.

    Slots: backend (see `attention`); gather_kv(latent_BSC, k_rope_BSR) -> the same over T keys.
    """

    def __init__(self, cfg: DeepseekV3Config, rope: Rope) -> None:
        super().__init__()
        self.backend = "auto"
        self.gather_kv: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = keep_local
        self.scale = rope.attention_scale(cfg.qk_head_dim)
        self.qk_widths = [cfg.qk_nope_head_dim, cfg.qk_rope_head_dim]
        self.kv_widths = [cfg.qk_nope_head_dim, cfg.v_head_dim]
        self.latent_widths = [cfg.kv_lora_rank, cfg.qk_rope_head_dim]

        std, eps = cfg.initializer_range, cfg.latent_norm_eps
        queries = cfg.num_heads * cfg.qk_head_dim
        if cfg.q_lora_rank:
            self.q_down = Linear(cfg.hidden_size, cfg.q_lora_rank, std=std)
            self.q_norm = RMSNorm(cfg.q_lora_rank, eps=eps)
            self.q_up = Linear(cfg.q_lora_rank, queries, std=std)
        else:
            self.q = Linear(cfg.hidden_size, queries, std=std)
        self.kv_down = Linear(cfg.hidden_size, sum(self.latent_widths), std=std)
        self.kv_norm = RMSNorm(cfg.kv_lora_rank, eps=eps)
        self.kv_up = Linear(cfg.kv_lora_rank, cfg.num_heads * sum(self.kv_widths), std=std)
        self.out = Linear(cfg.num_heads * cfg.v_head_dim, cfg.hidden_size, std=std)

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        # As many heads as the weights give: tensor parallelism leaves a rank some of them.
        q_BSHQ = self._queries(x_BSD).unflatten(-1, (-1, sum(self.qk_widths)))
        q_nope_BSHN, q_rope_BSHR = q_BSHQ.split(self.qk_widths, dim=-1)
        q_BSHQ = torch.cat([q_nope_BSHN, context.rotation(q_rope_BSHR)], dim=-1)

        latent_BSC, k_rope_BSR = self.kv_down(x_BSD).split(self.latent_widths, dim=-1)
        k_rope_BSR = context.rotation(k_rope_BSR.unsqueeze(2)).squeeze(2)
        latent_BTC, k_rope_BTR = self.gather_kv(self.kv_norm(latent_BSC), k_rope_BSR)
        kv_BTHX = self.kv_up(latent_BTC).unflatten(-1, (-1, sum(self.kv_widths)))
        k_nope_BTHN, v_BTHV = kv_BTHX.split(self.kv_widths, dim=-1)
        k_rope_BTHR = k_rope_BTR.unsqueeze(2).expand(-1, -1, k_nope_BTHN.shape[2], -1)
        k_BTHQ = torch.cat([k_nope_BTHN, k_rope_BTHR], dim=-1)

        out_BSHV = attention(
            q_BSHQ, k_BTHQ, v_BTHV, scale=self.scale, mask=context.mask, backend=self.backend
        )
        return self.out(out_BSHV.flatten(2))

    def _queries(self, x_BSD: Tensor) -> Tensor:
        if hasattr(self, "q"):
            return self.q(x_BSD)
        return self.q_up(self.q_norm(self.q_down(x_BSD)))


class Block(nn.Module):
    """Pre-norm: attention, then a dense MLP (`mlp`) or experts (`moe`)."""

    def __init__(self, cfg: DeepseekV3Config, layer: int, rope: Rope) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(cfg.hidden_size, eps=cfg.norm_eps)
        self.attention = LatentAttention(cfg, rope)
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


def build_moe(cfg: DeepseekV3Config, layer: int) -> MoE:
    """The experts of block `layer`, with that layer's balance settings."""
    hidden, inner, std = cfg.hidden_size, cfg.moe_intermediate_size, cfg.initializer_range
    router = Router(
        hidden,
        cfg.num_experts,
        cfg.top_k,
        num_groups=cfg.num_expert_groups,
        num_limited_groups=cfg.num_limited_groups,
        score_function=cfg.score_function,
        normalize_weights=cfg.normalize_weights,
        route_scale=cfg.route_scale,
        std=std,
    )
    shared = None
    if cfg.num_shared_experts:  # side by side they are one wider MLP
        shared = SwiGLU(hidden, inner * cfg.num_shared_experts, std=std)
    experts = Experts(cfg.num_experts, hidden, inner, std=std)
    return MoE(router, experts, shared, balance=cfg.balance(layer))


class Model(Decoder):
    """DeepSeek-V3, or the part of it with blocks `layers`. See `Decoder`."""

    def __init__(
        self, cfg: DeepseekV3Config, *, layers: range, has_embedding: bool, has_head: bool
    ) -> None:
        rope = Rope(cfg.qk_rope_head_dim, cfg.rope_theta, cfg.max_seq_len, cfg.rope_scaling)
        super().__init__(
            cfg,
            layers=layers,
            has_embedding=has_embedding,
            has_head=has_head,
            rope=rope,
            block=lambda layer: (Block if layer < cfg.num_layers else MtpBlock)(cfg, layer, rope),
        )
