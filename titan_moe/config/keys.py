"""What can be read off the section classes: every key, its type in words, the nearest valid one.

A key's path is a tuple of table names, list positions and, last, the key's own name; written with
dots (`data.sources.0.path`) it is what the command line takes and what messages show.
"""

import inspect
import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from titan_moe.config.model import ModelConfig
from titan_moe.config.sections import RunConfig

KeyPath = tuple[str | int, ...]
Sections = Mapping[str, type[BaseModel]]

TYPE_NAMES = {int: "integer", float: "number", str: "string", bool: "true or false"}
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
LONGEST_SHOWN_VALUE = 80


@dataclass(frozen=True)
class Key:
    """One key of one table. `default` is TOML text; None: the key may be absent, or is required."""

    table: str
    name: str
    type: str
    required: bool
    default: str | None
    description: str


def sections_of(model_class: type[ModelConfig]) -> dict[str, type[BaseModel]]:
    """Table name -> section class, in the order of RunConfig, with the recipe's own `[model]`."""
    sections = {
        name: tables_in(info.annotation)[0] for name, info in RunConfig.model_fields.items()
    }
    return sections | {"model": model_class}


def dotted(path: Iterable[str | int]) -> str:
    """With dots between the parts, and quotes, as in TOML, around a part that holds some itself."""
    return ".".join(f'"{part}"' if "." in str(part) else str(part) for part in path)


def path_of(key: str) -> KeyPath:
    parts = key.split(".")
    return tuple(part if (at := number_in(part)) is None else at for part in parts)


def number_in(text: str) -> int | None:
    """What up to nine decimal digits count; None: `text` is anything else."""
    return int(text) if re.fullmatch(r"\d{1,9}", text) else None


def toml_text(value: Any) -> str:
    """`value` as TOML would write it on one line, cut where it is long."""
    text = _toml_text(value)
    return text if len(text) <= LONGEST_SHOWN_VALUE else text[: LONGEST_SHOWN_VALUE - 3] + "..."


def _toml_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_toml_text(v)}" for k, v in value.items()) + "}"
    return str(value)


def _members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, without None; of any other annotation, itself."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(m for arg in get_args(annotation) for m in _members(arg))
    return () if annotation is types.NoneType else (annotation,)


def tables_in(annotation: Any) -> tuple[type[BaseModel], ...]:
    """Section classes that a value of this annotation may be."""
    return tuple(m for m in _members(annotation) if inspect.isclass(m) and issubclass(m, BaseModel))


def item_of(annotation: Any) -> Any | None:
    """Annotation of a list's items; None: not a list."""
    lists = [m for m in _members(annotation) if get_origin(m) in (list, tuple)]
    return get_args(lists[0])[0] if lists else None


def kinds_of(annotation: Any) -> frozenset[type]:
    """Python types in which TOML may give this key: str, int, float, bool, list, dict."""
    kinds: set[type] = set()
    for member in _members(annotation):
        if get_origin(member) is Literal:
            kinds |= {type(value) for value in get_args(member)}
        elif get_origin(member) in (list, tuple):
            kinds.add(list)
        else:
            kinds.add(member if member in TYPE_NAMES else dict)
    return frozenset(kinds)


def field_at(sections: Sections, path: KeyPath) -> FieldInfo | None:
    """The field that `path` names; None: there is none. List items and tables are no fields."""
    tables: tuple[type[BaseModel], ...] = tuple(
        table for name, table in sections.items() if path[:1] == (name,)
    )
    field: FieldInfo | None = None
    for part in path[1:]:
        if isinstance(part, int):
            item = item_of(field.annotation) if field else None
            tables, field = tables_in(item), (FieldInfo(annotation=item) if item else None)
        else:
            found = [table.model_fields[part] for table in tables if part in table.model_fields]
            field = found[0] if found else None
            tables = tables_in(field.annotation) if field else ()
    return field


def describe(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """A key's type in words, with its bounds: `integer > 0`, `"linear" | "cosine"`."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return describe(arguments[0], [*metadata, *arguments[1:]])
    if get_origin(annotation) is Literal:
        return " | ".join(map(_toml_text, arguments))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(describe(a, metadata) for a in arguments if a is not types.NoneType)
    if get_origin(annotation) in (list, tuple):
        item, bounds, rest = describe(arguments[0]).partition(" ")
        plural = item + "s" * (item in ("integer", "number", "string", "table"))
        return f"list of {plural}{bounds}{rest}{_limits(metadata)}"
    return TYPE_NAMES.get(annotation, "table") + _limits(metadata)


def _limits(metadata: Iterable[Any]) -> str:
    words = ""
    for item in metadata:
        if isinstance(item, FieldInfo):
            words += _limits(item.metadata)
            continue
        for name, sign in BOUNDS.items():
            if getattr(item, name, None) is not None:
                words += f" {'and ' if words else ''}{sign} {getattr(item, name)}"
        if getattr(item, "multiple_of", None):
            words += f", multiple of {item.multiple_of}"
        if getattr(item, "min_length", None):
            words += ", not empty"
        if getattr(item, "pattern", None):
            words += f", of the form {item.pattern}"
        if getattr(item, "max_length", None):
            words += f", at most {item.max_length} long"
    return words


def keys_of(table: str, section: type[BaseModel]) -> Iterator[Key]:
    """Every key of a section, nested tables after the table that holds them."""
    nested: list[tuple[str, type[BaseModel]]] = []
    for name, info in section.model_fields.items():
        inner = tables_in(info.annotation) or tables_in(item_of(info.annotation))
        nested += [(f"{table}.{name}", cls) for cls in inner]
        if inner and not info.is_required():
            continue
        default = None if info.is_required() else info.get_default(call_default_factory=True)
        yield Key(
            table,
            name,
            describe(info.annotation, info.metadata),
            info.is_required(),
            None if default is None else _toml_text(default),
            info.description or "",
        )
    for name, cls in nested:
        yield from keys_of(name, cls)


def nearest_key(sections: Sections, path: KeyPath) -> str | None:
    """The valid key most like `path`: in the same table if close, else in another one."""
    *parents, name = (part for part in path if isinstance(part, str))
    everywhere = [
        (*key.table.split("."), key.name) for t, s in sections.items() for key in keys_of(t, s)
    ]
    everywhere += [(table,) for table in sections]
    here = [key[-1] for key in everywhere if key[:-1] == tuple(parents)]
    same_name = [dotted(key) for key in everywhere if key[-1] == name]

    def close(names: list[str], cutoff: float) -> list[str]:
        return get_close_matches(name, names, n=1, cutoff=cutoff)

    siblings = [dotted([*path[:-1], match]) for match in close(here, 0.8) or close(here, 0.6)]
    if siblings and (close(here, 0.8) or not same_name):
        return siblings[0]
    if same_name:
        return get_close_matches(dotted(path), same_name, n=1, cutoff=0.0)[0]
    elsewhere = close([key[-1] for key in everywhere], 0.8)
    return next((dotted(key) for key in everywhere if key[-1] in elsewhere), None)
