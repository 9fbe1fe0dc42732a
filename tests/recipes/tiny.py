"""A tiny DeepSeek-V3 with nothing left trivial: groups, shared experts, latents of every kind."""

from typing import Any

import torch
from torch import Tensor

from recipes.deepseek_v3.config import DeepseekV3Config
from recipes.deepseek_v3.model import Model
from tests.layers.helpers import fill
from titan_moe.layers.moe import MoE

SIZES: dict[str, Any] = {
    "recipe": "recipes.deepseek_v3",
    "vocab_size": 96,
    "hidden_size": 48,
    "num_layers": 4,
    "num_dense_layers": 1,
    "num_heads": 4,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 16,
    "top_k": 3,
    "num_shared_experts": 2,
    "max_seq_len": 64,
    "rope_theta": 10000.0,
    "norm_eps": 1e-5,  # unlike the latents' 1e-6
    "initializer_range": 0.2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_expert_groups": 4,
    "num_limited_groups": 2,
    "score_function": "sigmoid",
    "normalize_weights": True,
    "route_scale": 2.5,
}


def config(**changes: Any) -> DeepseekV3Config:
    return DeepseekV3Config.model_validate({**SIZES, **changes})


def whole(cfg: DeepseekV3Config) -> Model:
    """All layers, with norms and selection biases unlike their first values."""
    model: Model = fill(Model(cfg, layers=range(cfg.num_layers), has_embedding=True, has_head=True))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
        for module in model.modules():
            if isinstance(module, MoE):
                bias = module.router.selection_bias
                bias.copy_(0.2 * torch.randn(bias.shape, generator=generator))
    return model


def batch(seq: int = 40) -> dict[str, Tensor]:
    """Two rows of one document each, and what the model takes beside them."""
    tokens_BS = torch.randint(0, 96, (2, seq), generator=torch.Generator().manual_seed(6))
    return {
        "positions_BS": torch.arange(seq).expand(2, seq),
        "document_ids_BS": torch.zeros(2, seq, dtype=torch.int64),
        "tokens_BS": tokens_BS,
    }


def labels_of(tokens_BS: Tensor) -> Tensor:
    """The next token; none after the last."""
    return torch.cat([tokens_BS[:, 1:], torch.full_like(tokens_BS[:, :1], -100)], dim=1)
