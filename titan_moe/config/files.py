"""TOML files, layered by `extends`, and which file wrote each key."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tomli

from titan_moe.config.errors import ConfigError
from titan_moe.config.keys import KeyPath, toml_text


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
    _read_into(document, path, said_by=())
    return document


def _read_into(document: Document, path: Path, said_by: tuple[Path, ...]) -> None:
    if path.resolve() in (p.resolve() for p in said_by):
        circle = " -> ".join(map(str, (*said_by, path)))
        raise ConfigError([f"{said_by[-1]}: extends goes in a circle: {circle}"])
    tree = _parse(path, said_by)
    bases = tree.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        wanted = "expected the path of a TOML file, relative to this one, or a list of them"
        raise ConfigError([f"{path}: extends = {toml_text(bases)}: {wanted}"])
    for base in bases:
        _read_into(document, _beside(path, base), (*said_by, path))
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
    asked_for = "".join(f" (extended by {file})" for file in list(said_by)[-1:])
    try:
        return tomli.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        there = [str(file) for file in path.parent.glob("*.toml")]
        like = get_close_matches(str(path), there, n=1, cutoff=0.6)
        meant = f"; did you mean {like[0]}?" if like else ""
        raise ConfigError([f"{path}: no such file{asked_for}{meant}"]) from None
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read{asked_for}: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not UTF-8 at byte {error.start}"]) from None
    except tomli.TOMLDecodeError as error:
        raise ConfigError([f"{path}: not valid TOML: {error}"]) from None
