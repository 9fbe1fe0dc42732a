"""GPT-OSS's names on the Hugging Face side. Gate and up take turns along one last dimension."""

from titan_moe.config.model import ModelConfig
from titan_moe.hf_table import HuggingFace, OursOnly, Weight

OURS, THEIRS = "layers.{layer}", "model.layers.{layer}"
GATES, UPS = (0, 2), (1, 2)


def derived(cfg: ModelConfig) -> dict[str, object]:
    windows = [cfg.attention_shape(layer).window for layer in range(cfg.num_layers)]
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    return {"layer_types": kinds}


HF = HuggingFace(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    weights=(
        Weight("embedding.weight", "model.embed_tokens.weight"),
        Weight("head.norm.weight", "model.norm.weight"),
        Weight("head.output.weight", "lm_head.weight"),
        Weight(f"{OURS}.attention_norm.weight", f"{THEIRS}.input_layernorm.weight"),
        Weight(f"{OURS}.attention.sinks_H", f"{THEIRS}.self_attn.sinks"),
        *(
            Weight(f"{OURS}.attention.{ours}.{kind}", f"{THEIRS}.self_attn.{theirs}_proj.{kind}")
            for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o"))
            for kind in ("weight", "bias")
        ),
        Weight(f"{OURS}.mlp_norm.weight", f"{THEIRS}.post_attention_layernorm.weight"),
        Weight(f"{OURS}.moe.router.weight", f"{THEIRS}.mlp.router.weight"),
        Weight(f"{OURS}.moe.router.bias", f"{THEIRS}.mlp.router.bias"),
        *(
            Weight(f"{OURS}.moe.experts.{ours}", f"{THEIRS}.mlp.experts.{theirs}", every=every)
            for ours, theirs, every in (
                ("gate", "gate_up_proj", GATES),
                ("gate_bias", "gate_up_proj_bias", GATES),
                ("up", "gate_up_proj", UPS),
                ("up_bias", "gate_up_proj_bias", UPS),
                ("down", "down_proj", None),
                ("down_bias", "down_proj_bias", None),
            )
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
        "head_dim": "head_dim",
        "sliding_window": "sliding_window",
        "swiglu_limit": "swiglu_limit",
        "swiglu_alpha": "swiglu_alpha",
        "moe_intermediate_size": "intermediate_size",
        "num_experts": "num_local_experts",
        "top_k": "num_experts_per_tok",
        "max_seq_len": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "initializer_range": "initializer_range",
    },
    only={"num_dense_layers": 0, "num_shared_experts": 0, "intermediate_size": 0},
    defaults={
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    fixed={
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    derived=derived,
    derived_from=("full_attention_every",),
)
