"""What pydantic found, told in one line per key: file, key, value, what was expected."""

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from titan_moe.config.files import Document
from titan_moe.config.keys import (
    KeyPath,
    Sections,
    describe,
    dotted,
    field_at,
    item_of,
    kinds_of,
    tables_in,
    toml_text,
)
from titan_moe.config.overrides import COMMAND_LINE, parse_value, unknown_key

OF_THE_KEY_ITSELF = ("missing", "extra_forbidden")


def faults_of(
    error: ValidationError, table: str, document: Document, sections: Sections
) -> list[str]:
    """One line for each wrong key of one top-level table."""
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for details in error.errors():
        by_path.setdefault(_path_of(details, table, document.tree), []).append(details)
    deepest = [p for p in by_path if not any(q[: len(p)] == p for q in by_path if q != p)]
    return [_fault(path, by_path[path], document, sections) for path in deepest]


def value_at(tree: Mapping[str, Any], path: KeyPath) -> Any:
    node: Any = tree
    for part in path:
        node = node[part]
    return node


def _path_of(details: ErrorDetails, table: str, tree: Mapping[str, Any]) -> KeyPath:
    """Where in the tree it went wrong, without the union members that pydantic names too."""
    path: list[str | int] = [table]
    node: Any = tree.get(table, {})
    for at, part in enumerate(details["loc"]):
        missing = details["type"] == "missing" and at == len(details["loc"]) - 1
        known = isinstance(node, dict) and part in node
        if known or (isinstance(node, list) and isinstance(part, int)):
            path.append(part)
            node = node[part]
        elif missing:
            path.append(part)
    return tuple(path)


def _fault(
    path: KeyPath, errors: Sequence[ErrorDetails], document: Document, sections: Sections
) -> str:
    kind = errors[0]["type"]
    if kind == "missing":
        return missing_key(path, document, sections)
    origin = document.origin(path)
    if kind == "extra_forbidden":
        return f"{origin}: {unknown_key(sections, path)}"
    raised = [e["ctx"]["error"] for e in errors if e["type"] in ("value_error", "assertion_error")]
    value = value_at(document.tree, path)
    field = field_at(sections, path)
    if raised and isinstance(value, dict):
        return _table_fault(path, str(raised[0]), document)
    shown = f"{dotted(path)} = {toml_text(value)}"
    if raised:
        return f"{origin}: {shown}: {raised[0]}"
    if field is None:  # a top-level table
        return f"{origin}: {shown}: expected a table, [{dotted(path)}]"
    hint = _hint(value, field.annotation, path, from_file=origin != COMMAND_LINE)
    return f"{origin}: {shown}: expected {describe(field.annotation, field.metadata)}{hint}"


def missing_key(path: KeyPath, document: Document, sections: Sections) -> str:
    """Laid to the main file, where it can be added; in a list's item, to who wrote the list."""
    field = field_at(sections, path)
    assert field is not None, f"{dotted(path)} is required, but not a key"
    in_list = any(isinstance(part, int) for part in path)
    writer = document.origin(path) if in_list else document.shown
    wanted = f"{describe(field.annotation, field.metadata)}: {field.description}"
    return f"{writer}: missing key {dotted(path)} ({wanted})"


def _table_fault(path: KeyPath, message: str, document: Document) -> str:
    """A check over several keys of a table; it is laid to the key that its message starts with."""
    origin = document.origin((*path, message.split(" ", 1)[0]))
    return f"{origin}: [{dotted(path)}] {message}"


def _hint(value: Any, annotation: Any, path: KeyPath, from_file: bool) -> str:
    kinds = kinds_of(annotation)
    if isinstance(value, dict) and tables_in(item_of(annotation)):
        return f"; write [[{dotted(path)}]]"
    if isinstance(value, float) and not math.isfinite(value):
        return "; it must be finite"
    if isinstance(value, str) and from_file and str not in kinds:
        unquoted = parse_value(value, annotation)
        return f"; write {value} without quotes" if type(unquoted) in kinds else ""
    if isinstance(value, str) and get_origin(annotation) is Literal:
        near = get_close_matches(value, [str(v) for v in get_args(annotation)], n=1)
        return f"; did you mean {toml_text(near[0])}?" if near else ""
    if type(value) is float and value.is_integer() and int in kinds and float not in kinds:
        return f"; write {int(value)}"
    if type(value) in (int, float) and kinds == {str}:
        return f"; write {toml_text(str(value))}"
    return ""
