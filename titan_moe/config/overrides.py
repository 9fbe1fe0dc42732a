"""`--section.key=value` on the command line, typed by what the key wants."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_moe.config.files import Document, parse_toml
from titan_moe.config.keys import (
    KeyPath,
    Sections,
    dotted,
    field_at,
    kinds_of,
    nearest_key,
    path_of,
)

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Override:
    path: KeyPath
    text: str


def parse_overrides(arguments: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Split `--a.b=v` and `--a.b v`. Returns the overrides in order, and a line per fault."""
    overrides: list[Override] = []
    faults: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, text = argument.partition("=")
        if not re.fullmatch(r"--\w+(\.\w+)+", name):
            wanted = "expected --section.key=value, for example --training.steps=10"
            faults.append(f"{COMMAND_LINE}: {argument}: {wanted}")
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                faults.append(f"{COMMAND_LINE}: {name} has no value: write {name}=value")
                continue
            text = rest.pop(0)
        overrides.append(Override(path_of(name.removeprefix("--")), text))
    return overrides, faults


def apply_overrides(
    document: Document, overrides: Sequence[Override], sections: Sections
) -> list[str]:
    """Write the overrides into the document, in order. Returns a line per fault."""
    faults = []
    for override in overrides:
        if override.path[0] == "model" and "model" not in sections:
            continue  # the recipe cannot be loaded, which is told elsewhere
        field = field_at(sections, override.path)
        if field is None:
            faults.append(f"{COMMAND_LINE}: {unknown_key(sections, override.path)}")
            continue
        fault = _write(document, override.path, parse_value(override.text, field.annotation))
        faults += [f"{COMMAND_LINE}: {fault}"] if fault else []
    return faults


def unknown_key(sections: Sections, path: KeyPath) -> str:
    """`unknown key training.stpes; did you mean training.steps?`"""
    meant = tuple(
        p for part in path for p in (part.split(".") if isinstance(part, str) else [part])
    )
    if meant != path and field_at(sections, meant):
        return f"unknown key {dotted(path)}; write {dotted(meant)}, without the quotes"
    near = nearest_key(sections, meant)
    return f"unknown key {dotted(path)}" + (f"; did you mean {near}?" if near else "")


def parse_value(text: str, annotation: Any) -> Any:
    """Text of the command line -> a value, by the types that the key takes.

    A key that takes strings alone gets the text as it stands (quotes are optional). Any other is
    read as TOML; what is no TOML stays text, for validation to refuse.
    """
    if kinds_of(annotation) == {str} and not (text[:1] in "\"'" and text[:1] == text[-1:]):
        return text
    try:
        parsed = parse_toml(f"value = {text}")
    except ValueError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _write(document: Document, path: KeyPath, value: Any) -> str | None:
    """Set one value, making tables on the way. Returns what stands against it."""
    node: Any = document.tree
    for at, part in enumerate(path):
        last = at == len(path) - 1
        if isinstance(part, int):
            if not isinstance(node, list):
                return f"{dotted(path)}: there is no list {dotted(path[:at])}"
            if part >= len(node):
                return f"{dotted(path)}: {dotted(path[:at])} has {len(node)} entries, from 0 on"
            node[part] = value if last else node[part]
        elif not isinstance(node, dict):
            return f"{dotted(path)}: {dotted(path[:at])} is not a table"
        elif last:
            node[part] = value
        elif part not in node and isinstance(path[at + 1], int):
            return f"{dotted(path)}: there is no list {dotted(path[: at + 1])}"
        else:
            node.setdefault(part, {})
        node = node[part]
    document.mark(path, COMMAND_LINE)
    return None
