"""Rotary positions as config.json has them: base, stretching, and the part of a head that turns.

They are told in two styles. The old one has `rope_theta` and `rope_scaling` (null where nothing is
stretched), the new one both in `rope_parameters`. A file may have both, as long as they agree.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from titan_moe.config.model import ModelConfig, RopeScaling
from titan_moe.hf_table import HuggingFace

Json = dict[str, Any]

SCALING, PARAMETERS = "rope_scaling", "rope_parameters"
THETA, PARTIAL = "rope_theta", "partial_rotary_factor"
ORIGINAL = "original_max_position_embeddings"
BESIDE_SCALING = {"type", "rope_type", THETA, PARTIAL}


def rope_json(table: HuggingFace, cfg: ModelConfig) -> Json:
    """The old style, which new readers know as well."""
    scaling: Json | None = None
    if cfg.rope_scaling:
        scaling = _scaling_json(cfg.rope_scaling)
    elif SCALING in table.defaults:  # null would mean that default
        scaling = {"rope_type": "default"}
    return {THETA: cfg.rope_theta, SCALING: scaling}


def rope_keys(table: HuggingFace, config: Mapping[str, Any], where: str) -> Json:
    """What config.json states of `rope_theta`, `partial_rotary_factor` (each only where it does)
    and `rope_scaling` (a dump of RopeScaling, or None), in our words.

    Raises:
        ValueError: positions told twice, and not alike; or stretched in a way that is not computed
            here.
    """
    tables = _tables(config, where)
    keys: Json = {}
    for key in (THETA, PARTIAL):
        told = {"": config, **{f"{name}.": content for name, content in tables.items()}}
        values = {at + key: t[key] for at, t in told.items() if t.get(key) is not None}
        if values:
            keys[key] = _same(values, where)
    scalings = {name: _scaling_keys(name, content, where) for name, content in tables.items()}
    if not scalings:
        default = table.defaults.get(SCALING)
        scalings = {SCALING: _scaling_keys(SCALING, default, where) if default else None}
    _same({name: tables.get(name) for name in scalings}, where, list(scalings.values()))
    return {**keys, SCALING: next(iter(scalings.values()))}


def _tables(config: Mapping[str, Any], where: str) -> dict[str, Mapping[str, Any]]:
    """Those of the two that are there, by name."""
    tables: dict[str, Mapping[str, Any]] = {}
    for name in (SCALING, PARAMETERS):
        content = config.get(name)
        if content is None or (name == SCALING and content == {}):
            continue
        if not isinstance(content, dict):
            raise ValueError(f"{where}: {name} = {content!r}: not an object with keys")
        for key, value in content.items():
            if isinstance(value, dict):
                raise ValueError(
                    f"{where}: {name}.{key} = {value!r}: positions of one kind of layer; only "
                    "the same positions in all layers are computed here"
                )
        tables[name] = content
    return tables


def _same(told: Mapping[str, Any], where: str, read: list[Any] | None = None) -> Any:
    """The value of all. told: by name, as they are written. read: as they are meant, if unlike."""
    values = list(told.values()) if read is None else read
    if any(value != values[0] for value in values):
        both = " and ".join(f"{name} = {value!r}" for name, value in told.items())
        raise ValueError(f"{where}: {both}: they contradict each other")
    return values[0]


def _scaling_json(scaling: RopeScaling) -> Json:
    """`type` is what older readers ask for, `rope_type` what newer ones do."""
    keys = scaling.model_dump(exclude={"type", "original_max_seq_len"})
    if not scaling.mscale_all_dim:  # then neither has an effect
        del keys["mscale"], keys["mscale_all_dim"]
    kind = {"type": scaling.type, "rope_type": scaling.type}
    return kind | {ORIGINAL: scaling.original_max_seq_len} | keys


def _scaling_keys(name: str, scaling: Mapping[str, Any], where: str) -> Json | None:
    kinds = [scaling[key] for key in ("rope_type", "type") if scaling.get(key) is not None]
    kind = kinds[0] if kinds else "default"
    if kinds and kinds[-1] != kind:
        raise ValueError(f"{where}: {name}.rope_type = {kind!r}, but {name}.type = {kinds[-1]!r}")
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"{where}: {name} of type {kind!r}: only 'yarn' is computed")
    if lacking := [key for key in ("factor", ORIGINAL) if scaling.get(key) is None]:
        raise ValueError(f"{where}: {name} = {dict(scaling)}: 'yarn' needs {lacking[0]}")
    given = {
        "original_max_seq_len" if key == ORIGINAL else key: value
        for key, value in scaling.items()
        if key not in BESIDE_SCALING and value is not None
    }
    if strange := given.keys() - RopeScaling.model_fields.keys():
        key = min(strange)
        raise ValueError(f"{where}: {name}.{key} = {given[key]!r}: not computed here")
    if not given.get("mscale_all_dim"):  # then neither has an effect
        given = {key: value for key, value in given.items() if not key.startswith("mscale")}
    else:  # YaRN's own temperature, unless the numerator is given too
        given.setdefault("mscale", 0.0)
    try:
        return RopeScaling(type="yarn", **given).model_dump()
    except ValidationError as error:
        [first, *_] = error.errors()
        key = ".".join(map(str, first["loc"])).replace("original_max_seq_len", ORIGINAL)
        raise ValueError(f"{where}: {name}.{key} = {first['input']!r}: {first['msg']}") from None
