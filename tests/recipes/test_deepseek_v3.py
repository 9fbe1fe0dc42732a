"""The recipe against transformers' model of the same weights: logits, and every gradient."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config as HfConfig
from transformers import DeepseekV3ForCausalLM

from recipes.deepseek_v3.config import DeepseekV3Config
from recipes.deepseek_v3.model import Model
from tests.layers.helpers import error
from tests.recipes.tiny import batch, config, labels_of, whole
from tests.tolerances import FP32_LOGITS, FP32_MODEL_GRADIENT

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_seq_len": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "query latent": {},
    "no query latent": {"q_lora_rank": 0},
    "yarn": {"rope_scaling": YARN},
    "not normalised": {"normalize_weights": False, "route_scale": 1.3},
    "one group": {"num_expert_groups": 1, "num_limited_groups": 1},
    "all dense": {"num_dense_layers": 4},
}
# Ours, theirs. Rotary pairs are neighbours on both sides, so no rows move.
NAMES = [
    (r"embedding\.", "model.embed_tokens."),
    (r"head\.norm\.", "model.norm."),
    (r"head\.output\.", "lm_head."),
    (r"layers\.(\d+)\.attention_norm\.", r"model.layers.\1.input_layernorm."),
    (r"layers\.(\d+)\.mlp_norm\.", r"model.layers.\1.post_attention_layernorm."),
    (r"layers\.(\d+)\.attention\.q\.", r"model.layers.\1.self_attn.q_proj."),
    (r"layers\.(\d+)\.attention\.q_down\.", r"model.layers.\1.self_attn.q_a_proj."),
    (r"layers\.(\d+)\.attention\.q_norm\.", r"model.layers.\1.self_attn.q_a_layernorm."),
    (r"layers\.(\d+)\.attention\.q_up\.", r"model.layers.\1.self_attn.q_b_proj."),
    (r"layers\.(\d+)\.attention\.kv_down\.", r"model.layers.\1.self_attn.kv_a_proj_with_mqa."),
    (r"layers\.(\d+)\.attention\.kv_norm\.", r"model.layers.\1.self_attn.kv_a_layernorm."),
    (r"layers\.(\d+)\.attention\.kv_up\.", r"model.layers.\1.self_attn.kv_b_proj."),
    (r"layers\.(\d+)\.attention\.out\.", r"model.layers.\1.self_attn.o_proj."),
    (r"layers\.(\d+)\.mlp\.(gate|up|down)\.", r"model.layers.\1.mlp.\2_proj."),
    (r"layers\.(\d+)\.moe\.shared\.(\w+)\.", r"model.layers.\1.mlp.shared_experts.\2_proj."),
    (r"layers\.(\d+)\.moe\.router\.weight", r"model.layers.\1.mlp.gate.weight"),
    (
        r"layers\.(\d+)\.moe\.router\.selection_bias",
        r"model.layers.\1.mlp.gate.e_score_correction_bias",
    ),
]


def to_theirs(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names and shapes of transformers: gate and up side by side, [E, out, in]."""
    theirs = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate"):
            up = tensors[name.removesuffix("gate") + "up"]
            layer = f"model.{name.removesuffix('moe.experts.gate')}mlp.experts."
            theirs[layer + "gate_up_proj"] = torch.cat([tensor, up], dim=2).transpose(1, 2)
            down = tensors[name.removesuffix("gate") + "down"]
            theirs[layer + "down_proj"] = down.transpose(1, 2)
        for ours, other in NAMES:
            if re.match(ours, name):
                theirs[re.sub(ours, other, name)] = tensor
    return theirs


def their_model(cfg: DeepseekV3Config, ours: Model) -> DeepseekV3ForCausalLM:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    if cfg.rope_scaling:
        keys = cfg.rope_scaling.model_dump()
        rope |= {"rope_type": keys.pop("type")}
        rope |= {"original_max_position_embeddings": keys.pop("original_max_seq_len"), **keys}
    theirs = DeepseekV3ForCausalLM(
        HfConfig(
            vocab_size=cfg.vocab_size,
            hidden_size=cfg.hidden_size,
            intermediate_size=cfg.intermediate_size,
            moe_intermediate_size=cfg.moe_intermediate_size,
            num_hidden_layers=cfg.num_layers,
            num_attention_heads=cfg.num_heads,
            num_key_value_heads=cfg.num_heads,
            n_shared_experts=cfg.num_shared_experts,
            n_routed_experts=cfg.num_experts,
            routed_scaling_factor=cfg.route_scale,
            kv_lora_rank=cfg.kv_lora_rank,
            q_lora_rank=cfg.q_lora_rank or None,
            qk_rope_head_dim=cfg.qk_rope_head_dim,
            v_head_dim=cfg.v_head_dim,
            qk_nope_head_dim=cfg.qk_nope_head_dim,
            n_group=cfg.num_expert_groups,
            topk_group=cfg.num_limited_groups,
            num_experts_per_tok=cfg.top_k,
            first_k_dense_replace=cfg.num_dense_layers,
            norm_topk_prob=cfg.normalize_weights,
            max_position_embeddings=cfg.max_seq_len,
            rms_norm_eps=cfg.norm_eps,
            rope_parameters=rope,
            attn_implementation="eager",
        )
    )
    saved = {name: t for name, t in ours.state_dict().items() if "previous_counts" not in name}
    theirs.load_state_dict(to_theirs(saved), strict=True)
    return theirs


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_gradients_equal_transformers(name: str) -> None:
    cfg = config(**VARIANTS[name])
    ours = whole(cfg)
    theirs = their_model(cfg, ours)
    inputs = batch()
    tokens_BS, labels_BS = inputs["tokens_BS"], labels_of(inputs["tokens_BS"])

    hidden_BSD = ours(tokens_BS, **inputs)
    logits_BSV = theirs(input_ids=tokens_BS).logits
    assert (ours.head.logits(hidden_BSD) - logits_BSV).abs().max() < FP32_LOGITS

    ours.head.loss(hidden_BSD, labels_BS).backward()
    cross_entropy = torch.nn.functional.cross_entropy
    cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum").backward()
    gradients = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(ours.parameters()))
    for their_name, gradient in to_theirs(gradients).items():
        reference = theirs.get_parameter(their_name).grad
        assert reference is not None, their_name
        assert error(gradient, reference) < FP32_MODEL_GRADIENT, their_name


def test_packed_documents_equal_each_document_alone() -> None:
    cfg = config()
    ours = whole(cfg).eval()
    theirs = their_model(cfg, ours).eval()
    tokens_BS = batch()["tokens_BS"]
    pieces = [(0, 11), (11, 30), (30, 40)]
    document_ids_BS = torch.zeros_like(tokens_BS)
    positions_BS = torch.zeros_like(tokens_BS)
    for number, (start, stop) in enumerate(pieces):
        document_ids_BS[:, start:stop] = number
        positions_BS[:, start:stop] = torch.arange(stop - start)
    document_ids_BS[:, 30:] = -1  # the last is padding: computed, like any other
    hidden_BSD = ours(
        tokens_BS,
        positions_BS=positions_BS,
        document_ids_BS=document_ids_BS,
        tokens_BS=tokens_BS,
    )
    alone = [theirs(input_ids=tokens_BS[:, start:stop]).logits for start, stop in pieces]
    assert (ours.head.logits(hidden_BSD) - torch.cat(alone, dim=1)).abs().max() < FP32_LOGITS
