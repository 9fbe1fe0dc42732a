"""FLOPs per token against published models and against a count of every multiplication."""

from pathlib import Path

import pytest

from titan_moe.config import load_config
from titan_moe.config.model import AttentionShape, ModelConfig
from titan_moe.config.mtp import MultiTokenPrediction
from titan_moe.flops import (
    block_flops_per_token,
    logits_flops_per_token,
    model_flops_per_token,
)

REPOSITORY = Path(__file__).parents[1]
SEQ_LEN = 4096
GIGA = 1e9


class GroupedQueryConfig(MultiTokenPrediction):
    """Plain grouped-query attention, for the published sizes below."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None

    def attention_shape(self, layer: int) -> AttentionShape:
        heads = 2 * self.num_heads + 2 * self.num_kv_heads  # queries and outputs, keys and values
        return AttentionShape(
            projection_params=self.hidden_size * self.head_dim * heads,
            num_heads=self.num_heads,
            qk_head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            window=self.window,
        )


class LatentConfig(MultiTokenPrediction):
    """Multi-head latent attention of DeepSeek-V3 (arXiv 2412.19437, section 4.2)."""

    def attention_shape(self, layer: int) -> AttentionShape:
        heads, nope, rope, value = self.num_heads, 128, 64, 128
        q_rank, kv_rank = 1536, 512
        return AttentionShape(
            projection_params=self.hidden_size * q_rank
            + q_rank * heads * (nope + rope)
            + self.hidden_size * (kv_rank + rope)
            + kv_rank * heads * (nope + value)
            + heads * value * self.hidden_size,
            num_heads=heads,
            qk_head_dim=nope + rope,
            v_head_dim=value,
        )


COMMON = {
    "recipe": "none",
    "max_seq_len": SEQ_LEN,
    "rope_theta": 10000.0,
    "norm_eps": 1e-6,
    "initializer_range": 0.02,
}

DEEPSEEK_V3 = LatentConfig(
    **COMMON,
    vocab_size=129280,
    hidden_size=7168,
    num_layers=61,
    num_dense_layers=3,
    num_heads=128,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_experts=256,
    top_k=8,
    num_shared_experts=1,
)


def qwen3(**sizes: int) -> GroupedQueryConfig:
    fixed = {"vocab_size": 151936, "num_kv_heads": 4, "head_dim": 128, "num_experts": 128}
    return GroupedQueryConfig(**COMMON, **fixed, top_k=8, **sizes)


QWEN3_30B = qwen3(
    hidden_size=2048,
    num_layers=48,
    num_heads=32,
    intermediate_size=6144,
    moe_intermediate_size=768,
)
QWEN3_235B = qwen3(
    hidden_size=4096,
    num_layers=94,
    num_heads=64,
    intermediate_size=12288,
    moe_intermediate_size=1536,
)


@pytest.mark.parametrize(
    ("cfg", "num_mtp_layers", "digits", "gigaflops"),
    [
        (DEEPSEEK_V3, 0, 2, 249.81),
        (DEEPSEEK_V3, 1, 2, 259.99),
        (QWEN3_30B, 0, 3, 23.006),
        (QWEN3_235B, 0, 2, 148.03),
    ],
)
def test_published_models(
    cfg: ModelConfig, num_mtp_layers: int, digits: int, gigaflops: float
) -> None:
    cfg = cfg.model_copy(update={"num_mtp_layers": num_mtp_layers})
    total = model_flops_per_token(cfg, SEQ_LEN).total
    assert round(total / GIGA, digits) == gigaflops


def test_the_recipe_counts_as_published() -> None:
    cfg = load_config(REPOSITORY / "train_configs" / "deepseek_v3" / "671b.toml").model
    for num_mtp_layers in (0, 1):
        ours, published = (
            model.model_copy(update={"num_mtp_layers": num_mtp_layers})
            for model in (cfg, DEEPSEEK_V3)
        )
        assert model_flops_per_token(ours, SEQ_LEN) == model_flops_per_token(published, SEQ_LEN)


def tiny(**overrides: int | None) -> GroupedQueryConfig:
    sizes: dict[str, int | None] = {
        "vocab_size": 11,
        "hidden_size": 6,
        "num_layers": 3,
        "num_dense_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
        "intermediate_size": 10,
        "moe_intermediate_size": 5,
        "num_experts": 7,
        "top_k": 2,
        "num_shared_experts": 1,
    }
    return GroupedQueryConfig(**(COMMON | sizes | overrides))


def test_each_kind_by_hand() -> None:
    flops = model_flops_per_token(tiny(), seq_len=8)
    assert flops.attention_projections == 6 * 3 * (6 * 8 + 6 * 4 + 6 * 4 + 8 * 6)  # q, k, v, o
    assert flops.attention_scores == 6 * 3 * 2 * (4 + 4) * 4  # 2 heads, half of 8 keys
    assert flops.dense_mlp == 6 * 1 * 3 * 6 * 10
    assert flops.experts == 6 * 2 * 2 * 3 * 6 * 5  # 2 layers, 2 of 7 experts
    assert flops.shared_experts == 6 * 2 * 1 * 3 * 6 * 5
    assert flops.logits == 6 * 6 * 11
    assert flops.mtp == 0


def test_experts_that_are_not_visited_cost_nothing() -> None:
    few, many = (model_flops_per_token(tiny(num_experts=n), 8).total for n in (4, 400))
    assert few == many


def test_window_is_the_mean_over_queries() -> None:
    seq_len, window = 4000, 1000
    keys_seen = [min(query + 0.5, window) for query in range(seq_len)]  # midpoint of each query
    windowed = model_flops_per_token(tiny(window=window), seq_len).attention_scores
    whole = model_flops_per_token(tiny(), seq_len).attention_scores
    assert windowed / whole == pytest.approx(sum(keys_seen) / seq_len / (seq_len / 2), rel=1e-12)
    longer = model_flops_per_token(tiny(window=seq_len * 2), seq_len).attention_scores
    assert longer == whole


def test_mtp_layer_is_a_block_a_projection_and_logits() -> None:
    block = 6 * 144 + 6 * 2 * 8 * 4 + 6 * 3 * 3 * 6 * 5  # attention, scores, 2 + 1 experts
    for num_dense_layers in (1, 3):  # even where no other block has experts
        cfg = tiny(num_dense_layers=num_dense_layers, num_mtp_layers=2)
        flops = model_flops_per_token(cfg, seq_len=8)
        assert flops.mtp == 2 * (block + 6 * 12 * 6 + 6 * 6 * 11)
        without = model_flops_per_token(tiny(num_dense_layers=num_dense_layers), seq_len=8)
        assert flops.total - flops.mtp == without.total


def test_one_block_and_the_logits_alone() -> None:
    dense, sparse = (block_flops_per_token(tiny(), layer, seq_len=8) for layer in (0, 2))
    attention = 6 * 144 + 6 * 2 * 8 * 4
    assert dense.total == attention + 6 * 3 * 6 * 10
    assert sparse.total == attention + 6 * (2 + 1) * 3 * 6 * 5
    assert logits_flops_per_token(tiny()) == 6 * 6 * 11
