"""Mixtral's names on the Hugging Face side."""

from titan_moe.hf_table import HuggingFace, OursOnly, Weight

OURS, THEIRS = "layers.{layer}", "model.layers.{layer}"

HF = HuggingFace(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    weights=(
        Weight("embedding.weight", "model.embed_tokens.weight"),
        Weight("head.norm.weight", "model.norm.weight"),
        Weight("head.output.weight", "lm_head.weight"),
        Weight(f"{OURS}.attention_norm.weight", f"{THEIRS}.input_layernorm.weight"),
        *(
            Weight(f"{OURS}.attention.{name}.weight", f"{THEIRS}.self_attn.{name}_proj.weight")
            for name in ("q", "k", "v")
        ),
        Weight(f"{OURS}.attention.out.weight", f"{THEIRS}.self_attn.o_proj.weight"),
        Weight(f"{OURS}.mlp_norm.weight", f"{THEIRS}.post_attention_layernorm.weight"),
        Weight(f"{OURS}.moe.router.weight", f"{THEIRS}.block_sparse_moe.gate.weight"),
        *(
            Weight(
                f"{OURS}.moe.experts.{name}",
                f"{THEIRS}.block_sparse_moe.experts.{{expert}}.{theirs}.weight",
                transposed=True,
            )
            for name, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
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
        "sliding_window": "sliding_window",
        "moe_intermediate_size": "intermediate_size",
        "num_experts": "num_local_experts",
        "top_k": "num_experts_per_tok",
        "max_seq_len": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "initializer_range": "initializer_range",
    },
    only={"num_dense_layers": 0, "num_shared_experts": 0, "intermediate_size": 0},
    defaults={"sliding_window": None},
    fixed={
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "router_jitter_noise": 0.0,
        "tie_word_embeddings": False,
    },
    derived=lambda cfg: {"head_dim": cfg.head_dim},
    follows=("head_dim",),
)
