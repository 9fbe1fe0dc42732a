"""TOML files, layered by `extends`, and which file wrote each key."""

import os.path
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tomli

from titan_moe.config.base import NO_NUL
from titan_moe.config.command_line import DEFAULT_CONFIG
from titan_moe.config.errors import ConfigError
from titan_moe.config.keys import KeyPath, dotted, toml_text

DEEPEST = 32
INTEGER_BITS = 64


@dataclass
class Document:
    """A config as it was written, before it is typed.

    shown: the main file, as the person named it.
    tree: nested tables. origins: path of a value -> who wrote it last.
    """

    shown: str
    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def origin(self, path: KeyPath) -> str:
        """Who wrote the value at `path`, or the closest table or list around it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return self.shown

    def layer(self, tree: dict[str, Any], writer: str) -> None:
        """Put `tree` on top: tables merge, everything else replaces."""
        self._merge(self.tree, tree, (), writer)

    def _merge(self, below: dict[str, Any], above: dict[str, Any], at: KeyPath, by: str) -> None:
        for key, value in above.items():
            path = (*at, key)
            if isinstance(value, dict) and isinstance(below.get(key), dict):
                self._merge(below[key], value, path, by)
            else:
                self.mark(path, by)
                below[key] = value

    def mark(self, path: KeyPath, writer: str) -> None:
        """Note that `writer` wrote all that is at and below `path`."""
        for known in [p for p in self.origins if p[: len(path)] == path]:
            del self.origins[known]
        self.origins[path] = writer


def read_document(path: Path) -> Document:
    """Read a TOML file and all that it extends.

    Raises ConfigError: a file that is missing or no TOML, or `extends` that goes in a circle.
    """
    document = Document(shown=str(path))
    _read_into(document, path, said_by=(), read=set())
    return document


def _read_into(document: Document, path: Path, said_by: tuple[Path, ...], read: set[str]) -> None:
    """Lay what `path` extends, then `path` itself; what was `read` already keeps its first place,
    below all that stands on it."""
    if "\0" in str(path):
        raise ConfigError([f"{toml_text(str(path))}: {NO_NUL}{_asked_for(said_by)}"])
    file = os.path.realpath(path)
    if file in map(os.path.realpath, said_by):
        circle = " -> ".join(map(str, (*said_by, path)))
        raise ConfigError([f"{said_by[-1]}: extends goes in a circle: {circle}"])
    if file in read:
        return
    read.add(file)
    tree = _parse(path, said_by)
    bases = tree.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        wanted = "expected the path of a TOML file, relative to this one, or a list of them"
        raise ConfigError([f"{path}: extends = {toml_text(bases)}: {wanted}"])
    for base in bases:
        _read_into(document, _beside(path, base), (*said_by, path), read)
    document.layer(tree, writer=str(path))


def _beside(path: Path, base: str) -> Path:
    """`base` as seen from the folder of `path`, without needless `..`."""
    parts: list[str] = []
    for part in (path.parent / base).parts:
        if part == ".." and parts and parts[-1] not in ("..", "/"):
            parts.pop()
        else:
            parts.append(part)
    return Path(*parts)


def _parse(path: Path, said_by: Iterable[Path]) -> dict[str, Any]:
    try:
        return parse_toml(path.read_bytes().decode("utf-8-sig"))  # with a byte order mark or none
    except FileNotFoundError:
        fault = f"{path}: no such file{_asked_for(said_by)}{_meant(path)}"
        raise ConfigError([fault]) from None
    except OSError as error:
        fault = f"{path}: cannot be read{_asked_for(said_by)}: {error.strerror}"
        raise ConfigError([fault]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not UTF-8 at byte {error.start}"]) from None
    except ValueError as error:
        raise ConfigError([f"{path}: not valid TOML: {error}"]) from None


def _asked_for(said_by: Iterable[Path]) -> str:
    return "".join(f" (extended by {file})" for file in list(said_by)[-1:])


def _meant(path: Path) -> str:
    """A config of nearly the same name, beside `path` or else among those that come along."""
    there = [*DEFAULT_CONFIG.parent.rglob("*.toml"), *path.parent.glob("*.toml")]
    stems = {file.stem: file for file in there if file.name != "pyproject.toml"}
    near = get_close_matches(path.stem, stems, n=1, cutoff=0.75)
    return f"; did you mean {stems[near[0]]}?" if near else ""


def parse_toml(text: str) -> dict[str, Any]:
    """Read TOML. Raises ValueError: it is none, or is deeper or counts further than TOML must."""
    try:
        tree = tomli.loads(text)
    except tomli.TOMLDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        fault = "nested too deeply" if deep else "an integer of thousands of digits"
        raise ValueError(f"{fault} (at line {_line_of(type(error), text)})") from None
    _refuse_excess(tree, ())
    return tree


def _line_of(kind: type[Exception], text: str) -> int:
    """The first line with which reading `text` ends in an exception of just this kind."""
    lines = text.splitlines(keepends=True)

    def breaks(count: int) -> bool:
        try:
            tomli.loads("".join(lines[:count]))
        except (ValueError, RecursionError) as error:
            return type(error) is kind
        return False

    return bisect_left(range(len(lines)), True, key=breaks)


def _refuse_excess(node: Any, path: KeyPath) -> None:
    if len(path) > DEEPEST:
        raise ValueError(f"{dotted(path)}: nested too deeply")
    if isinstance(node, dict | list):
        for part, value in node.items() if isinstance(node, dict) else enumerate(node):
            _refuse_excess(value, (*path, part))
    elif isinstance(node, int) and not -(1 << INTEGER_BITS - 1) <= node < 1 << INTEGER_BITS - 1:
        raise ValueError(f"{dotted(path)}: an integer of more than {INTEGER_BITS} bits")
