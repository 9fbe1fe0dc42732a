"""JSON Schema of a config (draft 2020-12), by which editors complete and check TOML."""

from typing import Any

from pydantic import create_model

from titan_moe.config.keys import Sections
from titan_moe.config.sections import RunConfig

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(sections: Sections) -> dict[str, Any]:
    """Schema of a whole file. A file that extends another need not repeat its required keys."""
    own_model: dict[str, Any] = {"model": (sections["model"], ...)}
    whole = create_model("RunConfig", __base__=RunConfig, **own_model)
    schema = _without_null(whole.model_json_schema())
    definitions = schema.pop("$defs")
    required: dict[str, Any] = {"required": schema.pop("required"), "properties": {}}
    listed = set(_names_in(definitions, "items"))
    for name, section in sections.items():
        keys = definitions[section.__name__].get("required")
        if keys:
            required["properties"][name] = {"required": keys}
    for name, definition in definitions.items():
        if name not in listed:  # tables merge over files; a list's entries are whole in one
            definition.pop("required", None)
    path = {"type": "string"}
    schema["properties"]["extends"] = {
        "description": "files below this one, relative to it; tables merge, lists replace",
        "anyOf": [path, {"type": "array", "items": path}],
    }
    return {
        "$schema": DRAFT,
        **schema,
        "title": "titan-moe",
        "if": {"not": {"required": ["extends"]}},
        "then": required,
        "$defs": definitions,
    }


def _names_in(node: Any, key: str) -> list[str]:
    """Names of the definitions that stand under `key` anywhere in `node`."""
    if isinstance(node, list):
        return [name for item in node for name in _names_in(item, key)]
    if not isinstance(node, dict):
        return []
    here = node.get(key)
    names = [here["$ref"].split("/")[-1]] if isinstance(here, dict) and "$ref" in here else []
    return names + [name for item in node.values() for name in _names_in(item, key)]


def _without_null(node: Any) -> Any:
    """TOML has no null: a key that may be None may be absent instead."""
    if isinstance(node, list):
        return [_without_null(item) for item in node if item != {"type": "null"}]
    if not isinstance(node, dict):
        return node
    node = {k: _without_null(v) for k, v in node.items() if not (k == "default" and v is None)}
    alternatives = node.get("anyOf")
    if alternatives is not None and len(alternatives) == 1:
        return {**alternatives[0], **{k: v for k, v in node.items() if k != "anyOf"}}
    return node
