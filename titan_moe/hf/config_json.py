"""A model's sizes as config.json has them, written and read by the recipe's table."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from titan_moe.config.model import OF_TRAINING, ModelConfig, RopeScaling
from titan_moe.hf_table import HuggingFace
from titan_moe.recipe import Recipe

Json = dict[str, Any]

# What a run may choose anew when it starts from weights; all else says what the weights mean.
OF_THE_RUN = OF_TRAINING | {"max_seq_len", "initializer_range"}
ORIGINAL = "original_max_position_embeddings"
BESIDE_SCALING = {"type", "rope_type", "rope_theta", "partial_rotary_factor", ORIGINAL}


def config_json(
    table: HuggingFace, cfg: ModelConfig, *, dtype: str, bos: int | None, eos: int | None
) -> Json:
    """What to write. dtype: "bfloat16" or "float32". bos, eos: token ids, None where unknown."""
    content: Json = {
        "architectures": [table.architecture],
        "model_type": table.model_type,
        "torch_dtype": dtype,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": _scaling_json(cfg.rope_scaling) if cfg.rope_scaling else None,
        "use_cache": True,
    }
    for ours, theirs in table.keys.items():
        value = getattr(cfg, ours)
        is_null = ours in table.nulls and value == table.nulls[ours]
        content[theirs] = None if is_null else value
    return content | dict(table.fixed) | table.derived(cfg)


def model_keys(table: HuggingFace, config: Mapping[str, Any], where: str) -> Json:
    """The keys of `[model]` that config.json states, be it of the old style or the new.

    Raises:
        ValueError: another model type, a `fixed` key of another value, or positions stretched in a
            way that is not known here.
    """
    config = _flat(config)
    if config.get("model_type") != table.model_type:
        raise ValueError(
            f"{where}: model_type = {config.get('model_type')!r}: the recipe is of "
            f"{table.model_type!r}"
        )
    config = {table.also.get(key, key): value for key, value in config.items()}
    _hold_to(table.fixed, config, where)
    keys: Json = {}
    for ours, theirs in table.keys.items():
        if theirs in config:
            value = config[theirs]
            keys[ours] = table.nulls.get(ours) if value is None else value
    if config.get("rope_theta") is not None:
        keys["rope_theta"] = config["rope_theta"]
    keys["rope_scaling"] = _scaling_keys(config.get("rope_scaling") or {}, where)
    return keys


def check_config(
    table: HuggingFace, cfg: ModelConfig, config: Mapping[str, Any], where: str
) -> None:
    """That a model may start from a folder's weights: they mean there what they mean here.

    Raises:
        ValueError: see `model_keys`; or sizes that differ, by key, with both values.
    """
    unlike = []
    for key, theirs in model_keys(table, config, where).items():
        ours = getattr(cfg, key)
        ours = ours.model_dump() if isinstance(ours, RopeScaling) else ours
        fewer = key in table.may_have_fewer and theirs is not None and ours <= theirs
        if key not in OF_THE_RUN and ours != theirs and not fewer:
            there = f" ({table.keys[key]})" if table.keys.get(key, key) != key else ""
            unlike.append(f"model.{key} = {ours}, but {theirs}{there} there")
    if unlike:
        raise ValueError(f"{where}: {'; '.join(unlike)}")
    _hold_to(table.derived(cfg), _flat(config), where)


def model_config(recipe: Recipe, name: str, config: Mapping[str, Any], where: str) -> ModelConfig:
    """The `[model]` of a folder. name: the recipe's dotted name.

    Raises:
        ValueError: see `model_keys`; or a key that config.json lacks, or whose value cannot be.
    """
    table = recipe.load_hf()
    keys = {key: v for key, v in model_keys(table, config, where).items() if v is not None}
    try:
        cfg = recipe.config.model_validate({"recipe": name, **keys})
    except ValidationError as error:
        wrong = [
            f"{table.keys.get(key, key) or 'sizes'}: {details['msg']}"
            for details in error.errors()
            for key in [".".join(map(str, details["loc"]))]
        ]
        raise ValueError(f"{where}: {'; '.join(wrong)}") from None
    _hold_to(table.derived(cfg), _flat(config), where)
    return cfg


def _hold_to(wanted: Mapping[str, Any], config: Mapping[str, Any], where: str) -> None:
    for key, value in wanted.items():
        if key in config and config[key] != value:
            raise ValueError(f"{where}: {key} = {config[key]!r}: the recipe computes {value!r}")


def _flat(config: Mapping[str, Any]) -> Json:
    """The new style, `rope_parameters`, told in the old one."""
    parameters = config.get("rope_parameters")
    if not parameters:
        return dict(config)
    flat = {key: value for key, value in config.items() if key != "rope_parameters"}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in parameters:
            flat[key] = parameters[key]
    flat["rope_scaling"] = parameters
    return flat


def _scaling_json(scaling: RopeScaling) -> Json:
    """`type` is what older readers ask for, `rope_type` what newer ones do."""
    keys = scaling.model_dump(exclude={"type", "original_max_seq_len"})
    if not scaling.mscale_all_dim:  # then neither has an effect
        del keys["mscale"], keys["mscale_all_dim"]
    kind = {"type": scaling.type, "rope_type": scaling.type}
    return kind | {ORIGINAL: scaling.original_max_seq_len} | keys


def _scaling_keys(scaling: Mapping[str, Any], where: str) -> Json | None:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn" or not scaling.get(ORIGINAL):
        raise ValueError(
            f"{where}: rope_scaling of type {kind!r}, {ORIGINAL} = {scaling.get(ORIGINAL)}: only "
            f"'yarn' is computed, and needs {ORIGINAL}"
        )
    given = {
        key: value
        for key, value in scaling.items()
        if key not in BESIDE_SCALING and value is not None
    }
    if strange := given.keys() - RopeScaling.model_fields.keys():
        key = min(strange)
        raise ValueError(f"{where}: rope_scaling.{key} = {given[key]!r}: not computed here")
    known = RopeScaling(type="yarn", original_max_seq_len=scaling[ORIGINAL], **given)
    if not known.mscale_all_dim:
        known = known.model_copy(update={"mscale": 1.0, "mscale_all_dim": 0.0})
    return known.model_dump()
