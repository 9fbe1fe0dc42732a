"""DeepSeek-V3's names on the Hugging Face side, Moonlight's and Kimi K2's too."""

from typing import Any

from titan_moe.hf_table import Copy, HuggingFace, LeftOut, OursOnly, Weight

OURS, THEIRS = "layers.{layer}", "model.layers.{layer}"


def mlp(ours: str, theirs: str) -> tuple[Weight, ...]:
    return tuple(
        Weight(f"{OURS}.{ours}.{name}.weight", f"{THEIRS}.{theirs}.{name}_proj.weight")
        for name in ("gate", "up", "down")
    )


def derived(cfg: Any) -> dict[str, Any]:
    if cfg.num_experts < 2 * cfg.num_expert_groups:
        raise ValueError(
            f"model.num_experts = {cfg.num_experts} in {cfg.num_expert_groups} groups "
            "(num_expert_groups): DeepseekV3ForCausalLM ranks groups by the best two experts of "
            "each, and cannot do with one"
        )
    return {"num_key_value_heads": cfg.num_heads}


HF = HuggingFace(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    weights=(
        Weight("embedding.weight", "model.embed_tokens.weight"),
        Weight("head.norm.weight", "model.norm.weight"),
        Weight("head.output.weight", "lm_head.weight"),
        Weight(f"{OURS}.attention_norm.weight", f"{THEIRS}.input_layernorm.weight"),
        Weight(f"{OURS}.attention.q.weight", f"{THEIRS}.self_attn.q_proj.weight"),
        Weight(f"{OURS}.attention.q_down.weight", f"{THEIRS}.self_attn.q_a_proj.weight"),
        Weight(f"{OURS}.attention.q_norm.weight", f"{THEIRS}.self_attn.q_a_layernorm.weight"),
        Weight(f"{OURS}.attention.q_up.weight", f"{THEIRS}.self_attn.q_b_proj.weight"),
        Weight(f"{OURS}.attention.kv_down.weight", f"{THEIRS}.self_attn.kv_a_proj_with_mqa.weight"),
        Weight(f"{OURS}.attention.kv_norm.weight", f"{THEIRS}.self_attn.kv_a_layernorm.weight"),
        Weight(f"{OURS}.attention.kv_up.weight", f"{THEIRS}.self_attn.kv_b_proj.weight"),
        Weight(f"{OURS}.attention.out.weight", f"{THEIRS}.self_attn.o_proj.weight"),
        Weight(f"{OURS}.mlp_norm.weight", f"{THEIRS}.post_attention_layernorm.weight"),
        *mlp("mlp", "mlp"),
        *mlp("moe.shared", "mlp.shared_experts"),
        Weight(f"{OURS}.moe.router.weight", f"{THEIRS}.mlp.gate.weight", float32=True),
        Weight(
            f"{OURS}.moe.router.selection_bias",
            f"{THEIRS}.mlp.gate.e_score_correction_bias",
            float32=True,
        ),
        *(
            Weight(
                f"{OURS}.moe.experts.{name}",
                f"{THEIRS}.mlp.experts.{{expert}}.{name}_proj.weight",
                transposed=True,
            )
            for name in ("gate", "up", "down")
        ),
        OursOnly(f"{OURS}.moe.previous_counts"),
        # Multi-token prediction: what a block has, and these.
        Weight("layers.{mtp}.embedding_norm.weight", "model.layers.{mtp}.enorm.weight"),
        Weight("layers.{mtp}.hidden_norm.weight", "model.layers.{mtp}.hnorm.weight"),
        Weight("layers.{mtp}.project.weight", "model.layers.{mtp}.eh_proj.weight"),
        Weight("layers.{mtp}.output_norm.weight", "model.layers.{mtp}.shared_head.norm.weight"),
        Copy("embedding.weight", "model.layers.{mtp}.embed_tokens.weight"),
        Copy("head.output.weight", "model.layers.{mtp}.shared_head.head.weight"),
        LeftOut("model.layers.{beyond}.*", "multi-token prediction that this model does without"),
        LeftOut(f"{THEIRS}.self_attn.rotary_emb.inv_freq", "angles follow from rope_theta"),
    ),
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_dense_layers": "first_k_dense_replace",
        "num_mtp_layers": "num_nextn_predict_layers",
        "num_heads": "num_attention_heads",
        "intermediate_size": "intermediate_size",
        "moe_intermediate_size": "moe_intermediate_size",
        "num_experts": "n_routed_experts",
        "top_k": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "max_seq_len": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "initializer_range": "initializer_range",
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_nope_head_dim": "qk_nope_head_dim",
        "qk_rope_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
        "num_expert_groups": "n_group",
        "num_limited_groups": "topk_group",
        "score_function": "scoring_func",
        "normalize_weights": "norm_topk_prob",
        "route_scale": "routed_scaling_factor",
    },
    only={"latent_norm_eps": 1e-6, "score_function": "sigmoid"},
    nulls={"q_lora_rank": 0},
    defaults={"scoring_func": "sigmoid"},
    may_have_fewer=("num_mtp_layers",),
    fixed={
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "moe_layer_freq": 1,
        "rope_interleave": True,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
    },
    derived=derived,
)
