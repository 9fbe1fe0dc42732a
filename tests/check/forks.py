"""Copies of recipes in a folder of their own, to be broken."""

from pathlib import Path

import pytest

from titan_moe.cli.fork import fork

Edit = tuple[str, str, str]
"""(file of the recipe, text that is there once, what stands in its place)"""


def forked(old: str, new: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *edits: Edit) -> None:
    """Fork into `folder`, go there, and edit."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    fork(f"recipes.{old}", new)
    for file, there, instead in edits:
        path = folder / new / file
        text = path.read_text("utf-8")
        assert text.count(there) == 1, f"{file}: {text.count(there)} times {there!r}"
        path.write_text(text.replace(there, instead), encoding="utf-8")
