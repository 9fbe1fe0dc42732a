"""A model's sizes as config.json has them, written and read by the recipe's table."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from titan_moe.config.model import OF_TRAINING, ModelConfig, RopeScaling
from titan_moe.hf.rope_json import PARTIAL, SCALING, THETA, Json, rope_json, rope_keys
from titan_moe.hf_table import HuggingFace
from titan_moe.recipe import Recipe

# What a run may choose anew when it starts from weights; all else says what the weights mean.
OF_THE_RUN = OF_TRAINING | {"max_seq_len", "initializer_range"}
OF_ALL_FAMILIES = {"recipe", THETA, SCALING}


def config_json(
    table: HuggingFace, cfg: ModelConfig, *, dtype: str, bos: int | None, eos: int | None
) -> Json:
    """What to write. dtype: "bfloat16" or "float32". bos, eos: token ids, None where unknown.

    Raises:
        ValueError: a key of `[model]` that the table says nothing of, or whose value their side
            does not compute.
    """
    check_expressible(table, cfg)
    content: Json = {
        "architectures": [table.architecture],
        "model_type": table.model_type,
        "torch_dtype": dtype,
        "bos_token_id": bos,
        "eos_token_id": eos,
        **rope_json(table, cfg),
        "use_cache": True,
    }
    for ours, theirs in table.keys.items():
        value = getattr(cfg, ours)
        is_null = ours in table.nulls and value == table.nulls[ours]
        content[theirs] = None if is_null else value
    return content | dict(table.fixed) | table.derived(cfg)


def check_expressible(table: HuggingFace, cfg: ModelConfig) -> None:
    """That config.json, with what their side takes for granted, says all that the weights mean.

    Raises:
        ValueError: see `config_json`.
    """
    told = OF_ALL_FAMILIES | OF_TRAINING | {*table.keys, *table.only, *table.derived_from}
    if untold := [key for key in type(cfg).model_fields if key not in told]:
        raise ValueError(
            f"model.{', model.'.join(untold)}: not in the table of {table.architecture}'s keys: "
            "add to its `keys` (the name in config.json), `only` (the one value that is computed "
            "there) or `derived_from`"
        )
    for key, value in table.only.items():
        if not _agree(getattr(cfg, key), value):
            raise ValueError(
                f"model.{key} = {getattr(cfg, key)!r}: {table.architecture} computes only "
                f"{value!r}, and config.json cannot say otherwise"
            )
    table.derived(cfg)


def model_keys(table: HuggingFace, config: Mapping[str, Any], where: str) -> Json:
    """The keys of `[model]` that config.json states, be it of the old style or the new.

    Raises:
        ValueError: another model type, a key that is missing and has no default there, a `fixed`
            key of another value, keys that contradict each other, or positions stretched in a way
            that is not known here.
    """
    if config.get("model_type") != table.model_type:
        raise ValueError(
            f"{where}: model_type = {config.get('model_type')!r}: the recipe is of "
            f"{table.model_type!r}"
        )
    config = _with_defaults(table, config, where)
    rope = rope_keys(table, config, where)
    config.pop(PARTIAL, None)
    if PARTIAL in rope:
        config[PARTIAL] = rope.pop(PARTIAL)
    fixed = table.fixed if PARTIAL in table.keys.values() else {**table.fixed, PARTIAL: 1.0}
    _hold_to({key: value for key, value in fixed.items() if key in config}, config, where)
    needed = {theirs for ours, theirs in table.keys.items() if ours not in OF_THE_RUN}
    if lacking := sorted(needed - config.keys() | {THETA} - rope.keys()):
        raise ValueError(f"{where}: no {', '.join(lacking)} in it, which says what weights mean")
    stated = {ours: config[theirs] for ours, theirs in table.keys.items() if theirs in config}
    return rope | {
        ours: table.nulls.get(ours) if value is None else value for ours, value in stated.items()
    }


def check_config(
    table: HuggingFace, cfg: ModelConfig, config: Mapping[str, Any], where: str
) -> None:
    """That a model may start from a folder's weights: they mean there what they mean here.

    Raises:
        ValueError: see `model_keys` and `check_expressible`; or sizes that differ, by key, with
            both values.
    """
    check_expressible(table, cfg)
    unlike = []
    for key, theirs in model_keys(table, config, where).items():
        value = getattr(cfg, key)
        ours: Any = value.model_dump() if isinstance(value, RopeScaling) else value
        fewer = key in table.may_have_fewer and type(theirs) is int and ours <= theirs
        if key not in OF_THE_RUN and not fewer and not _agree(ours, theirs):
            there = f" ({table.keys[key]})" if table.keys.get(key, key) != key else ""
            unlike.append(f"model.{key} = {ours}, but {theirs!r}{there} there")
    if unlike:
        raise ValueError(f"{where}: {'; '.join(unlike)}")
    _hold_to_derived(table, cfg, config, where)


def model_config(recipe: Recipe, name: str, config: Mapping[str, Any], where: str) -> ModelConfig:
    """The `[model]` of a folder. name: the recipe's dotted name.

    Raises:
        ValueError: see `model_keys` and `check_expressible`; or a key whose value cannot be.
    """
    table = recipe.load_hf()
    keys = model_keys(table, config, where)
    for key, value in keys.items():
        if value is None and recipe.config.model_fields[key].default is not None:
            raise ValueError(f"{where}: {table.keys[key]} is null, which says nothing here")
    given = {key: value for key, value in keys.items() if value is not None}
    try:
        cfg = recipe.config.model_validate({"recipe": name, **given})
    except ValidationError as error:
        wrong = [
            f"{table.keys.get(key, key) or 'sizes'}: {details['msg']}"
            + (f", not {details['input']!r}" if key in given else "")
            for details in error.errors()
            for key in [".".join(map(str, details["loc"]))]
        ]
        raise ValueError(f"{where}: {'; '.join(wrong)}") from None
    try:
        check_expressible(table, cfg)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    _hold_to_derived(table, cfg, config, where)
    return cfg


def _with_defaults(table: HuggingFace, config: Mapping[str, Any], where: str) -> Json:
    """By the names that `keys` has; what is absent has the value that it has there."""
    named: Json = {}
    for key, value in config.items():
        name = table.also.get(key, key)
        if named.setdefault(name, value) != value:
            both = f"{key} = {config[key]!r} and {name} = {named[name]!r}"
            raise ValueError(f"{where}: {both}: they are one key, and contradict each other")
    return {**{k: v for k, v in table.defaults.items() if k != SCALING}, **named}


def _hold_to_derived(
    table: HuggingFace, cfg: ModelConfig, config: Mapping[str, Any], where: str
) -> None:
    config = _with_defaults(table, config, where)
    wanted = table.derived(cfg)
    _hold_to(
        {k: v for k, v in wanted.items() if k not in table.follows or config.get(k) is not None},
        config,
        where,
    )


def _hold_to(wanted: Mapping[str, Any], config: Mapping[str, Any], where: str) -> None:
    for key, value in wanted.items():
        if key not in config:
            raise ValueError(f"{where}: no {key} in it: the recipe computes {value!r}")
        if not _agree(config[key], value):
            raise ValueError(f"{where}: {key} = {config[key]!r}: the recipe computes {value!r}")


def _agree(one: Any, other: Any) -> bool:
    """Equal, and of one kind: JSON's true is not 1."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)
