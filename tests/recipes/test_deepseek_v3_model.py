"""The recipe by itself: stages, published sizes, slots, dtypes, tracing, what FSDP will find."""

import fnmatch
import itertools
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.deepseek_v3 import RECIPE
from recipes.deepseek_v3.config import DeepseekV3Config
from recipes.deepseek_v3.model import Model
from tests.layers.helpers import fill
from tests.recipes.tiny import batch, config, labels_of, whole
from titan_moe.layers.mask import plain_causal

CONFIGS = Path(__file__).parents[2] / "train_configs" / "deepseek_v3"
BOUNDARIES = [0, 1, 3, 4]


def published(name: str) -> DeepseekV3Config:
    table = tomllib.loads((CONFIGS / name).read_text())
    return DeepseekV3Config.model_validate(table["model"])


def on_meta(cfg: DeepseekV3Config, layers: range | None = None) -> Model:
    with torch.device("meta"):
        layers = range(cfg.num_layers) if layers is None else layers
        return Model(
            cfg,
            layers=layers,
            has_embedding=layers.start == 0,
            has_head=layers.stop == cfg.num_layers,
        )


def stages_of(model: Model, cfg: DeepseekV3Config) -> list[Model]:
    """The same weights, in parts that are built as such."""
    stages = []
    for start, stop in itertools.pairwise(BOUNDARIES):
        stage = fill(
            Model(cfg, layers=range(start, stop), has_embedding=start == 0, has_head=stop == 4)
        )
        missing, unexpected = stage.load_state_dict(model.state_dict(), strict=False)
        assert not missing
        assert len(unexpected) < len(model.state_dict())
        stages.append(stage)
    return stages


def test_stages_partition_the_names_and_compose_to_the_whole() -> None:
    cfg = config(balance_loss_weight=0.1)
    model = whole(cfg)
    stages = stages_of(model, cfg)
    names = [name for stage in stages for name in stage.state_dict()]
    assert sorted(names) == sorted(model.state_dict())
    assert names == list(model.state_dict())

    inputs = batch()
    labels_BS = labels_of(inputs["tokens_BS"])
    loss = model.head.loss(model(inputs["tokens_BS"], **inputs), labels_BS)
    x = inputs["tokens_BS"]
    for stage in stages:
        x = stage(x, **inputs)
    staged_loss = stages[-1].head.loss(x, labels_BS)
    assert torch.equal(staged_loss, loss)
    loss.backward()
    staged_loss.backward()
    gradients = {n: p.grad for stage in stages for n, p in stage.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name


def params_by_hand(c: dict[str, Any]) -> int:
    """Every weight matrix and norm of the architecture, from the sizes in the file."""
    d, h = c["hidden_size"], c["num_heads"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    q, kv = c["q_lora_rank"], c["kv_lora_rank"]
    query = d * q + q + q * h * (nope + rope) if q else d * h * (nope + rope)
    attention = query + d * (kv + rope) + kv + kv * h * (nope + v) + h * v * d
    experts = 3 * d * c["moe_intermediate_size"] * (c["num_experts"] + c["num_shared_experts"])
    moe = experts + d * c["num_experts"]
    dense = c["num_dense_layers"]
    blocks = c["num_layers"] * (attention + 2 * d)
    blocks += dense * 3 * d * c["intermediate_size"] + (c["num_layers"] - dense) * moe
    # Of multi-token prediction: a block with experts, a projection, three norms.
    blocks += c["num_mtp_layers"] * (attention + 2 * d + moe + 2 * d * d + 3 * d)
    return blocks + 2 * c["vocab_size"] * d + d


@pytest.mark.parametrize(
    ("name", "mtp", "params"),
    [
        ("671b.toml", 0, 671_026_404_352),
        ("671b.toml", 1, 671_026_404_352 + 11_610_067_968),
        ("16b.toml", 0, 15_960_108_544),
        ("kimi-k2.toml", 0, 1_026_408_209_408),
    ],
)
def test_published_sizes(name: str, mtp: int, params: int) -> None:
    cfg = published(name).model_copy(update={"num_mtp_layers": mtp})
    model = on_meta(cfg)
    assert sum(p.numel() for p in model.parameters()) == params
    assert params_by_hand(cfg.model_dump()) == params
    halves = [on_meta(cfg, range(20)), on_meta(cfg, range(20, cfg.num_layers))]
    names = [n for half in halves for n, _ in half.named_parameters()]
    shared = ["embedding.weight"] * bool(mtp)  # the last part looks tokens up, too
    assert sorted(names) == sorted([n for n, _ in model.named_parameters()] + shared)


@pytest.mark.parametrize("name", ["671b.toml", "16b.toml", "kimi-k2.toml"])
def test_attention_shape_counts_its_projections(name: str) -> None:
    cfg = published(name)
    shape = cfg.attention_shape(0)
    attention = on_meta(cfg, range(1)).layers["0"].attention
    matrices = sum(p.numel() for p in attention.parameters() if p.dim() == 2)
    assert shape.projection_params == matrices
    assert (shape.num_heads, shape.qk_head_dim, shape.v_head_dim) == (cfg.num_heads, 192, 128)


def test_flops_of_the_published_model() -> None:
    """249.81 GFLOP per token at 4096, counted from the sharded parts that work on a token."""
    cfg = published("671b.toml")
    shape = cfg.attention_shape(0)
    mlp = 3 * cfg.hidden_size
    weights = cfg.num_layers * shape.projection_params
    weights += cfg.num_dense_layers * mlp * cfg.intermediate_size
    weights += cfg.num_moe_layers * mlp * cfg.moe_intermediate_size * 9
    weights += cfg.vocab_size * cfg.hidden_size
    scores = cfg.num_layers * 128 * (192 + 128) * 4096  # x2 for a multiply-add, /2 causal
    assert (6 * weights + 3 * scores) / 1e9 == pytest.approx(249.81, abs=0.005)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_step_of_a_published_layer_traces_on_meta(dtype: torch.dtype) -> None:
    cfg = published("671b.toml")
    torch.set_default_dtype(dtype)
    try:
        model = on_meta(cfg, range(2, 4))
    finally:
        torch.set_default_dtype(torch.float32)
    tokens_BS = torch.zeros(1, 128, dtype=torch.int64, device="meta")
    hidden_BSD = torch.empty(1, 128, cfg.hidden_size, device="meta", dtype=dtype)
    out_BSD = model(
        hidden_BSD, positions_BS=tokens_BS, document_ids_BS=tokens_BS, tokens_BS=tokens_BS
    )
    out_BSD.sum().backward()
    assert out_BSD.dtype == dtype
    assert out_BSD.shape == hidden_BSD.shape
    assert all(p.grad is not None for p in model.parameters())


def test_fsdp_units_name_every_parameter_once_they_nest() -> None:
    model = whole(config())
    modules = dict(model.named_modules())
    owner: dict[str, str] = {}
    for unit in RECIPE.load_sharding().fsdp_units:
        matched = [n for n in modules if _matches(n, unit.pattern)]
        assert matched, unit.pattern
        for module_name in matched:
            for name, _ in modules[module_name].named_parameters(prefix=module_name):
                owner.setdefault(name, unit.pattern)
    assert owner.keys() == {name for name, _ in model.named_parameters()}
    assert owner["layers.1.moe.router.weight"] == "layers.*.moe.router"
    assert owner["layers.1.moe.experts.gate"] == "layers.*.moe.experts"
    assert owner["layers.1.moe.shared.gate.weight"] == "layers.*"


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def test_balance_settings_are_honoured_layer_by_layer() -> None:
    """A layer with weight or rate 0 stops no later one, and a dense layer has none."""
    cfg = config(balance_loss_weight=[0.1, 0.0, 0.2], bias_update_rate=[0.0, 0.01, 0.02])
    model = whole(cfg)
    inputs = batch()
    model(inputs["tokens_BS"], **inputs).sum().backward()
    moes = [model.layers[str(layer)].moe for layer in (1, 2, 3)]
    assert not hasattr(model.layers["0"], "moe")
    losses = [moe.balance_loss_sum.item() for moe in moes]
    assert losses[0] > 0
    assert losses[1] == 0
    assert losses[2] > 0
    assert all(moe.counts.sum() == 2 * 40 * cfg.top_k for moe in moes)
    for moe, rate in zip(moes, (0.0, 0.01, 0.02), strict=True):
        before = moe.router.selection_bias.clone()
        moe.update_selection_bias(moe.counts)
        moved = (moe.router.selection_bias - before).abs().max().item()
        assert moved == pytest.approx(rate, abs=1e-6)


def test_padding_is_not_counted() -> None:
    cfg = config(balance_loss_weight=0.1)
    model, inputs = whole(cfg), batch()
    inputs["document_ids_BS"] = torch.zeros(2, 40, dtype=torch.int64)
    inputs["document_ids_BS"][0, 25:] = -1
    model(inputs["tokens_BS"], **inputs)
    for layer in (1, 2, 3):
        assert model.layers[str(layer)].moe.counts.sum() == (25 + 40) * cfg.top_k


def test_slots_reach_every_layer() -> None:
    model, inputs = whole(config()), batch()
    inputs["document_ids_BS"] = (torch.arange(40) // 20).expand(2, 40)
    expected = model(inputs["tokens_BS"], **inputs)
    calls = []
    for block in model.layers.values():

        def gather(latent: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            calls.append((latent.shape[-1], key.shape[-1]))
            return latent, key

        block.attention.gather_kv = gather
        block.attention.backend = "reference"
    out = model(inputs["tokens_BS"], **inputs)
    assert calls == [(16, 8)] * 4
    assert torch.allclose(out, expected, atol=1e-4)
    model.make_mask = plain_causal
    assert not torch.allclose(model(inputs["tokens_BS"], **inputs), expected, atol=1e-2)


def test_a_cast_model_keeps_routing_in_fp32_and_counts_in_int64() -> None:
    model, inputs = whole(config()).to(torch.bfloat16), batch()
    kinds = {"router.weight", "router.selection_bias"}
    for name, tensor in model.state_dict().items():
        own = name.split("moe.")[-1]
        expected = torch.float32 if own in kinds else torch.bfloat16
        assert tensor.dtype == (torch.int64 if own == "previous_counts" else expected), name
    loss = model.head.loss(model(inputs["tokens_BS"], **inputs), labels_of(inputs["tokens_BS"]))
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_fresh_model_predicts_nothing_in_particular() -> None:
    model, inputs = whole(config(initializer_range=0.02)).eval(), batch()
    labels_BS = labels_of(inputs["tokens_BS"])
    loss = model.head.loss(model(inputs["tokens_BS"], **inputs), labels_BS)
    assert loss.item() / (labels_BS >= 0).sum().item() == pytest.approx(math.log(96), rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_expert_groups": 3}, "num_experts = 16 is not divisible by num_expert_groups = 3"),
        ({"num_limited_groups": 5}, "num_limited_groups = 5 is more than num_expert_groups = 4"),
        ({"top_k": 9}, "top_k = 9 is more than the 8 experts of a token's 2 groups"),
        ({"num_dense_layers": 5}, "num_dense_layers = 5 is more than num_layers = 4"),
        ({"z_loss_weight": [0.1, 0.1]}, "z_loss_weight has 2 values for 3 MoE layers"),
        ({"balance_loss_weight": -1.0}, "greater than or equal to 0"),
        ({"qk_rope_head_dim": 7}, "multiple of 2"),
        ({"score_function": "relu"}, "'sigmoid' or 'softmax'"),
        ({"top_k": "3"}, "valid integer"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_seq_len": 16}},
            "max_seq_len = 64 is more than rope_scaling.factor x original_max_seq_len = 32",
        ),
    ],
)
def test_impossible_sizes_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)
