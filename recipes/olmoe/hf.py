"""OLMoE's names on the Hugging Face side."""

from titan_moe.hf_table import HuggingFace, OursOnly, Weight

OURS, THEIRS = "layers.{layer}", "model.layers.{layer}"

HF = HuggingFace(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    weights=(
        Weight("embedding.weight", "model.embed_tokens.weight"),
        Weight("head.norm.weight", "model.norm.weight"),
        Weight("head.output.weight", "lm_head.weight"),
        Weight(f"{OURS}.attention_norm.weight", f"{THEIRS}.input_layernorm.weight"),
        *(
            Weight(f"{OURS}.attention.{name}.weight", f"{THEIRS}.self_attn.{name}_proj.weight")
            for name in ("q", "k", "v")
        ),
        Weight(f"{OURS}.attention.q_norm.weight", f"{THEIRS}.self_attn.q_norm.weight"),
        Weight(f"{OURS}.attention.k_norm.weight", f"{THEIRS}.self_attn.k_norm.weight"),
        Weight(f"{OURS}.attention.out.weight", f"{THEIRS}.self_attn.o_proj.weight"),
        Weight(f"{OURS}.mlp_norm.weight", f"{THEIRS}.post_attention_layernorm.weight"),
        Weight(f"{OURS}.moe.router.weight", f"{THEIRS}.mlp.gate.weight"),
        *(
            Weight(
                f"{OURS}.moe.experts.{name}",
                f"{THEIRS}.mlp.experts.{{expert}}.{name}_proj.weight",
                transposed=True,
            )
            for name in ("gate", "up", "down")
        ),
        OursOnly(f"{OURS}.moe.router.selection_bias", must_be_zero=True),
        OursOnly(f"{OURS}.moe.previous_counts"),
    ),
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "moe_intermediate_size": "intermediate_size",
        "num_experts": "num_experts",
        "top_k": "num_experts_per_tok",
        "normalize_weights": "norm_topk_prob",
        "max_seq_len": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "initializer_range": "initializer_range",
    },
    only={"num_dense_layers": 0, "num_shared_experts": 0, "intermediate_size": 0},
    fixed={
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,  # as in OLMoE-1B-7B; attention here clips nothing
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
)
