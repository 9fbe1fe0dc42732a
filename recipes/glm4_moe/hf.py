"""GLM-4.5's names on the Hugging Face side."""

from typing import Any

from titan_moe.hf_table import Copy, HuggingFace, LeftOut, OursOnly, Weight

OURS, THEIRS = "layers.{layer}", "model.layers.{layer}"


def mlp(ours: str, theirs: str) -> tuple[Weight, ...]:
    return tuple(
        Weight(f"{OURS}.{ours}.{name}.weight", f"{THEIRS}.{theirs}.{name}_proj.weight")
        for name in ("gate", "up", "down")
    )


def derived(cfg: Any) -> dict[str, Any]:
    if cfg.num_experts < 2:
        raise ValueError(
            "model.num_experts = 1: Glm4MoeForCausalLM ranks experts by the best two, and cannot "
            "do with one"
        )
    return {}


HF = HuggingFace(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    weights=(
        Weight("embedding.weight", "model.embed_tokens.weight"),
        Weight("head.norm.weight", "model.norm.weight"),
        Weight("head.output.weight", "lm_head.weight"),
        Weight(f"{OURS}.attention_norm.weight", f"{THEIRS}.input_layernorm.weight"),
        *(
            Weight(f"{OURS}.attention.{name}.{kind}", f"{THEIRS}.self_attn.{name}_proj.{kind}")
            for name in ("q", "k", "v")
            for kind in ("weight", "bias")
        ),
        Weight(f"{OURS}.attention.q_norm.weight", f"{THEIRS}.self_attn.q_norm.weight"),
        Weight(f"{OURS}.attention.k_norm.weight", f"{THEIRS}.self_attn.k_norm.weight"),
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
    ),
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_dense_layers": "first_k_dense_replace",
        "num_mtp_layers": "num_nextn_predict_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "partial_rotary_factor": "partial_rotary_factor",
        "qk_norm": "use_qk_norm",
        "intermediate_size": "intermediate_size",
        "moe_intermediate_size": "moe_intermediate_size",
        "num_experts": "n_routed_experts",
        "top_k": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "route_scale": "routed_scaling_factor",
        "max_seq_len": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "initializer_range": "initializer_range",
    },
    defaults={"attention_bias": False},
    may_have_fewer=("num_mtp_layers",),
    fixed={
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "n_group": 1,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
    },
    derived=derived,
)
