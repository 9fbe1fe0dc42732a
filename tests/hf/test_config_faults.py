"""config.json where it says little, something odd, or what only one side computes.

What transformers makes of a file is the truth: of its config classes' values for absent keys, and
of the logits of what it loads.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.hf.test_transformers import ROOT, logits, model_of
from tests.tolerances import FP32_LOGITS
from titan_moe.config.model import ModelConfig, RopeScaling
from titan_moe.hf.config_json import check_config, config_json, model_config
from titan_moe.hf.export import export_model
from titan_moe.hf.load import load_weights
from titan_moe.hf.rope_json import rope_keys
from titan_moe.hf_table import HuggingFace
from titan_moe.recipe import Recipe, load_recipe

FAMILIES = sorted(path.parent.name for path in ROOT.glob("train_configs/*/debug.toml"))
ORIGINAL = "original_max_position_embeddings"
YARN = {"type": "yarn", "factor": 4.0, "original_max_seq_len": 64}
THEIR_YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64}
# Of their classes: what changes nothing that a model computes from its weights.
WITHOUT_EFFECT = {
    "bos_token_id",
    "eos_token_id",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "router_aux_loss_coef",
    "use_cache",
}
NOT_OF_THE_FAMILY = {  # heeded only where a `fixed` key has another value
    "qwen3_moe": {"intermediate_size", "sliding_window"},
}


def toml(family: str) -> Path:
    return ROOT / f"train_configs/{family}/debug.toml"


def parts(family: str, **changes: Any) -> tuple[HuggingFace, Recipe, ModelConfig]:
    _, recipe, cfg = model_of(toml(family), **changes)
    return recipe.load_hf(), recipe, cfg


def written(family: str, **changes: Any) -> dict[str, Any]:
    table, _, cfg = parts(family, **changes)
    content = config_json(table, cfg, dtype="float32", bos=None, eos=None)
    return dict(json.loads(json.dumps(content)))


EXPORTED: list[tuple[str, dict[str, Any]]] = [
    ("gpt_oss", {"rope_scaling": None}),
    ("gpt_oss", {"full_attention_every": 3, "swiglu_alpha": 1.1, "swiglu_limit": 0.5}),
    ("deepseek_v3", {"num_shared_experts": 0}),
    ("deepseek_v3", {"q_lora_rank": 0, "num_dense_layers": 0}),
    (
        "deepseek_v3",
        {"rope_scaling": YARN | {"factor": 16.0, "mscale": 0.0, "mscale_all_dim": 1.0}},
    ),
    ("mixtral", {"rope_scaling": YARN}),
    ("mixtral", {"sliding_window": None, "num_experts": 1, "top_k": 1}),
    ("olmoe", {"rope_scaling": YARN | {"truncate": False}}),
    ("qwen3_moe", {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}}),
    ("glm4_moe", {"rope_scaling": YARN, "qk_norm": False, "partial_rotary_factor": 0.25}),
]


@pytest.mark.parametrize(("family", "changes"), EXPORTED, ids=str)
def test_what_is_exported_is_what_transformers_computes(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model, recipe, cfg = model_of(toml(family), **changes)
    export_model(model, recipe, cfg, tmp_path / "x")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "x", dtype=torch.float32).eval()
    tokens_BS = torch.arange(160).view(2, 80) * 7 % 250
    with torch.no_grad():
        difference = logits(model, tokens_BS) - theirs(tokens_BS).logits
    assert difference.abs().max() < FP32_LOGITS
    load_weights([model], tmp_path / "x", recipe, cfg)
    theirs.config.save_pretrained(tmp_path / "theirs")
    for folder in ("x", "theirs"):
        content = json.loads((tmp_path / folder / "config.json").read_text())
        check_config(recipe.load_hf(), cfg, content, folder)


INEXPRESSIBLE: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek_v3", {"latent_norm_eps": 1e-2}, "latent_norm_eps = 0.01: .* computes only 1e-06"),
    ("deepseek_v3", {"score_function": "softmax"}, "score_function = 'softmax': .* only 'sigmoid'"),
    (
        "deepseek_v3",
        {"num_expert_groups": 8, "num_limited_groups": 4},
        "num_experts = 8 in 8 groups",
    ),
    ("glm4_moe", {"num_experts": 1, "top_k": 1}, "num_experts = 1: Glm4Moe"),
]


@pytest.mark.parametrize(("family", "changes", "message"), INEXPRESSIBLE, ids=str)
def test_what_they_do_not_compute_goes_neither_way(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model, recipe, cfg = model_of(toml(family), **changes)
    with pytest.raises(ValueError, match=message):
        export_model(model, recipe, cfg, tmp_path / "x")
    with pytest.raises(ValueError, match=message):
        check_config(recipe.load_hf(), cfg, written(family), "config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_a_family_is_told(family: str) -> None:
    written(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_a_fork_adds_stops_the_export(family: str, tmp_path: Path) -> None:
    model, recipe, cfg = model_of(toml(family))

    class Forked(type(cfg)):  # type: ignore[misc]
        logit_cap: float = 0.0

    forked = Forked.model_validate(cfg.model_dump(exclude_none=True))
    with pytest.raises(ValueError, match=r"model\.logit_cap: not in the table"):
        export_model(model, recipe, forked, tmp_path / "x")
    with pytest.raises(ValueError, match=r"model\.logit_cap: not in the table"):
        check_config(recipe.load_hf(), forked, written(family), "config.json")


def scaling_of(content: Any, table: HuggingFace) -> Any:
    return rope_keys(table, {"rope_scaling": content}, "config.json")["rope_scaling"]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_key_is_what_transformers_takes_for_it(family: str) -> None:
    table = load_recipe(f"recipes.{family}").load_hf()
    theirs = AutoConfig.for_model(table.model_type)
    assumed = {**table.fixed, **table.defaults}
    scaling = assumed.pop("rope_scaling", None)
    for key, value in assumed.items():
        if hasattr(theirs, key):
            assert getattr(theirs, key) == value, key
    got = rope_keys(table, {}, "config.json")["rope_scaling"]
    wanted = {k: v for k, v in theirs.rope_parameters.items() if k != "rope_theta"}
    assert got == scaling_of(wanted, table)
    assert (scaling is None) == (got is None)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_that_their_class_heeds_is_in_the_table(family: str) -> None:
    table = load_recipe(f"recipes.{family}").load_hf()
    theirs = type(AutoConfig.for_model(table.model_type))
    renamed = {**theirs.attribute_map, **table.also}
    names = {renamed.get(name, name) for name in vars(theirs)["__annotations__"]}
    names -= WITHOUT_EFFECT | NOT_OF_THE_FAMILY.get(family, set()) | {"rope_parameters"}
    names = {name for name in names if not name.startswith("_")}
    _, _, cfg = parts(family)
    told = {*table.keys.values(), *table.fixed, *table.derived(cfg)}
    assert {table.also.get(name, name) for name in names} <= told


@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_key_is_refused_or_means_what_it_says(family: str) -> None:
    """Whatever key is taken away: accepted only where transformers reads the same without it."""
    table, _, cfg = parts(family)
    full = written(family)
    kept = {"architectures", "torch_dtype", "bos_token_id", "eos_token_id", "use_cache"}
    of_the_run = {"initializer_range", "max_position_embeddings"}
    for key in full.keys() - kept - of_the_run:
        content = {name: value for name, value in full.items() if name != key}
        try:
            check_config(table, cfg, content, "config.json")
        except ValueError as error:
            assert key in str(error)  # noqa: PT017
            continue
        theirs = AutoConfig.for_model(**content)
        said = AutoConfig.for_model(**full)
        if hasattr(theirs, key) and key not in table.follows:
            assert getattr(theirs, key) == getattr(said, key), key
        assert theirs.rope_parameters == said.rope_parameters, key


ODD: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = False: the recipe computes"),
    ("deepseek_v3", {"num_nextn_predict_layers": "1"}, r"but '1' \(num_nextn_predict_layers\)"),
    ("deepseek_v3", {"num_nextn_predict_layers": None}, r"None \(num_nextn_predict_layers\)"),
    ("deepseek_v3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: the recipe"),
    ("deepseek_v3", {"scoring_func": "softmax"}, r"but 'softmax' \(scoring_func\)"),
    ("deepseek_v3", {"norm_topk_prob": 1}, r"but 1 \(norm_topk_prob\)"),
    ("qwen3_moe", {"num_experts_per_tok": "2"}, r"but '2' \(num_experts_per_tok\)"),
    ("qwen3_moe", {"num_local_experts": 9}, "num_local_experts = 9 and num_experts = 8"),
    ("qwen3_moe", {"rope_scaling": "yarn"}, "rope_scaling = 'yarn': not an object"),
    ("qwen3_moe", {"rope_parameters": [1]}, r"rope_parameters = \[1\]: not an object"),
    ("qwen3_moe", {"rope_scaling": {"type": "yarn", ORIGINAL: 64}}, "'yarn' needs factor"),
    ("qwen3_moe", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, f"'yarn' needs {ORIGINAL}"),
    ("qwen3_moe", {"rope_scaling": THEIR_YARN | {"factor": "4"}}, "rope_scaling.factor = '4': "),
    ("qwen3_moe", {"rope_scaling": THEIR_YARN | {ORIGINAL: -1}}, f"rope_scaling.{ORIGINAL} = -1"),
    ("qwen3_moe", {"rope_scaling": THEIR_YARN | {"type": "linear"}}, "but rope_scaling.type"),
    (
        "qwen3_moe",
        {"rope_scaling": THEIR_YARN, "rope_parameters": {"rope_type": "default"}},
        "rope_scaling = .* and rope_parameters = .*: they contradict each other",
    ),
    (
        "qwen3_moe",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
        "rope_theta = 10000.0 and rope_parameters.rope_theta = 5.0: they contradict",
    ),
    (
        "gpt_oss",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters.full_attention = .*: positions of one kind of layer",
    ),
    ("glm4_moe", {"attention_bias": None}, "attention_bias = None: the recipe computes True"),
]


@pytest.mark.parametrize(("family", "odd", "message"), ODD, ids=str)
def test_an_odd_value_is_named(family: str, odd: dict[str, Any], message: str) -> None:
    table, recipe, cfg = parts(family)
    content = written(family) | odd
    with pytest.raises(ValueError, match=r"^config\.json: .*" + message):
        check_config(table, cfg, content, "config.json")
    key = [*odd][-1]
    with pytest.raises(ValueError, match=rf"^config\.json: .*({key}|computes only)"):
        model_config(recipe, cfg.recipe, content, "config.json")


def test_null_of_gpt_oss_is_its_own_stretching() -> None:
    table, recipe, cfg = parts("gpt_oss")
    content = written("gpt_oss") | {"rope_scaling": None}
    theirs = AutoConfig.for_model(**content).rope_parameters
    read = model_config(recipe, cfg.recipe, content, "config.json").rope_scaling
    assert read is not None
    assert read.model_dump() == scaling_of(theirs, table)
    with pytest.raises(ValueError, match=r"model\.rope_scaling = .* but .*'factor': 32\.0"):
        check_config(table, cfg, content, "config.json")


@pytest.mark.parametrize("numerator", [{}, {"mscale": None}, {"mscale": 0.7}])
@pytest.mark.parametrize("denominator", [{}, {"mscale_all_dim": 0.0}, {"mscale_all_dim": 0.9}])
def test_temperatures_are_read_as_transformers_reads_them(
    numerator: dict[str, Any], denominator: dict[str, Any]
) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from titan_moe.layers.rope import Rope

    table, _, _ = parts("qwen3_moe")
    content = THEIR_YARN | numerator | denominator
    theirs = AutoConfig.for_model("qwen3_moe", rope_parameters={**content, "rope_theta": 1e4})
    scaling = RopeScaling(**scaling_of(content, table))
    magnitude = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))[1]
    assert Rope(8, 1e4, 256, scaling).magnitude() == pytest.approx(magnitude)


def test_a_numerator_alone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mscale = 0\.7 has no effect without mscale_all_dim"):
        RopeScaling.model_validate(YARN | {"mscale": 0.7})
