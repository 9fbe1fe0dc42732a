"""A recipe's table, spelled out for one model: which numbers of ours are which of theirs.

Import, export and their tests all go by the same `Part`s, so that the two directions cannot differ.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from titan_moe.checkpoint.state import MODEL, model_tensors
from titan_moe.config.model import ModelConfig
from titan_moe.config.words import counted
from titan_moe.hf_table import Copy, HuggingFace, LeftOut, OursOnly, Weight
from titan_moe.recipe import Recipe

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

MAX_NAMES = 8  # in one message


@dataclass(frozen=True)
class Part:
    """One of our tensors, or of its first dimension's slices, as it lies in one of theirs.

    index: along our first dimension; None: all of ours is in this tensor of theirs.
    transposed, every: see `Weight`.
    """

    ours: str
    theirs: str
    index: int | None = None
    transposed: bool = False
    every: tuple[int, int] | None = None

    def in_ours(self, ours: Tensor) -> Tensor:
        """That part of our tensor, a view."""
        return ours if self.index is None else ours[self.index]

    def in_theirs(self, theirs: Tensor) -> Tensor:
        """The same numbers in their tensor, a view in our orientation."""
        view = theirs.transpose(-1, -2) if self.transposed else theirs
        return view if self.every is None else view[..., self.every[0] :: self.every[1]]

    def their_shape(self, ours: Shape) -> Shape:
        """Of their whole tensor, where our whole tensor has shape `ours`."""
        shape = list(ours if self.index is None else ours[1:])
        if self.every is not None:
            shape[-1] *= self.every[1]
        if self.transposed:
            shape[-2:] = shape[:-3:-1]
        return tuple(shape)


@dataclass(frozen=True)
class Names:
    """All names of one model on both sides.

    ours: shapes of our tensors, by plain name. theirs: of theirs without copies, in the order that
    they are written in. parts: by our name. copies: from their second name to ours.
    only_ours: names without a place on their side, and whether their values must be zero.
    float32: theirs that are written so whatever the others are.
    """

    table: str
    ours: dict[str, Shape] = field(default_factory=dict)
    theirs: dict[str, Shape] = field(default_factory=dict)
    parts: dict[str, list[Part]] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    only_ours: dict[str, bool] = field(default_factory=dict)
    float32: set[str] = field(default_factory=set)
    left_out: list[tuple[LeftOut, re.Pattern[str]]] = field(default_factory=list)

    def check(self, stored: Shapes, where: str, layers: int) -> None:
        """Hold a folder's tensors to the table, and log what of them is left out.

        layers: that the folder's config.json states, those of multi-token prediction included.

        Raises:
            ValueError: a tensor that no row covers, one that a row names and the folder lacks, a
                shape that differs.
        """
        missing = [name for name in self.theirs if name not in stored]
        extra = [name for name in stored if name not in self.theirs and name not in self.copies]
        uncovered = [name for name in extra if self._why_left_out(name, layers) is None]
        wanted = self.theirs | {copy: self.ours[ours] for copy, ours in self.copies.items()}
        unlike = [
            f"{name} is {list(stored[name])} there, {list(shape)} by the model's sizes"
            for name, shape in wanted.items()
            if name in stored and tuple(stored[name]) != shape
        ]
        complaints = [
            f"{what}: {listed(names)}"
            for what, names in (
                ("not in the folder", missing),
                (f"in the folder, but in no row of {self.table}", uncovered),
                ("of another shape", unlike),
            )
            if names
        ]
        if complaints:
            raise ValueError(f"{where}: {'; '.join(complaints)}")
        reasons = Counter(self._why_left_out(name, layers) for name in extra)
        for row, count in reasons.items():
            assert row is not None
            logger.info("left out: %s, %s: %s", counted(count, "tensor"), row.theirs, row.why)

    def _why_left_out(self, name: str, layers: int) -> LeftOut | None:
        for row, pattern in self.left_out:
            if match := pattern.fullmatch(name):
                beyond = match.groupdict().get("beyond")
                if beyond is None or int(beyond) < layers:
                    return row
        return None


def names_of(recipe: Recipe, cfg: ModelConfig) -> Names:
    """The names of `cfg`'s model, built on meta: nothing of it takes memory.

    Raises:
        ValueError: the recipe has no table, or one of our tensors is in no row, or in several; or
            theirs would be filled in part, or twice.
    """
    table = recipe.load_hf()
    model_class = recipe.load_model_class()
    with torch.device("meta"):
        blocks = range(cfg.num_layers)
        model = model_class(cfg, layers=blocks, has_embedding=True, has_head=True)
    shapes = {
        name.removeprefix(MODEL): tuple(tensor.shape)
        for name, tensor in model_tensors([model]).items()
    }
    return spelled_out(table, cfg, shapes, recipe.hf or "")


def spelled_out(table: HuggingFace, cfg: ModelConfig, ours: Shapes, name: str) -> Names:
    """`table`, called `name` in messages, for a model with tensors `ours`. See `names_of`."""
    numbers = _Numbers(cfg.num_layers, cfg.mtp_depth())
    names = Names(name, ours=dict(ours))
    for tensor, shape in ours.items():
        _place(names, table, numbers, tensor, shape)
    for row in table.weights:
        if isinstance(row, LeftOut):
            names.left_out.append((row, numbers.regex(row.theirs)))
        elif isinstance(row, Copy):
            if row.ours not in ours:
                raise ValueError(f"{name}: {row} copies {row.ours}, which the model does not have")
            names.copies.update(dict.fromkeys(numbers.all_of(row.theirs), row.ours))
    _check_filled_once(names)
    return names


def _place(
    names: Names, table: HuggingFace, numbers: "_Numbers", tensor: str, shape: Shape
) -> None:
    """Find the one row that covers our tensor, and note its parts."""
    rows = [
        (row, match)
        for row in table.weights
        if isinstance(row, Weight | OursOnly)
        and (match := numbers.regex(row.ours).fullmatch(tensor))
    ]
    if len(rows) != 1:
        why = f"several rows: {', '.join(row.ours for row, _ in rows)}" if rows else "no row"
        raise ValueError(f"{tensor}: a tensor of the model that is in {why} of {names.table}")
    [(row, match)] = rows
    if isinstance(row, OursOnly):
        names.only_ours[tensor] = row.must_be_zero
        return
    theirs = row.theirs.format(**match.groupdict(), expert="{expert}")
    indices = range(shape[0]) if "{expert}" in theirs else [None]
    for index in indices:
        name = theirs.format(expert=index)
        part = Part(tensor, name, index, row.transposed, row.every)
        names.parts.setdefault(tensor, []).append(part)
        their_shape = part.their_shape(shape)
        if names.theirs.setdefault(name, their_shape) != their_shape:
            raise ValueError(
                f"{names.table}: rows of {name} want it {names.theirs[name]} and {their_shape}"
            )
        if row.float32:
            names.float32.add(name)


def _check_filled_once(names: Names) -> None:
    """Each entry of theirs comes from one of ours."""
    offsets: dict[str, list[int]] = {}
    steps: dict[str, int] = {}
    for part in (part for parts in names.parts.values() for part in parts):
        first, steps[part.theirs] = part.every or (0, 1)
        offsets.setdefault(part.theirs, []).append(first)
    for theirs, found in offsets.items():
        if sorted(found) != list(range(steps[theirs])):
            raise ValueError(
                f"{names.table}: of every {steps[theirs]} entries of {theirs}, rows "
                f"write number {', '.join(map(str, sorted(found)))}: each should be written once"
            )
    if twice := names.theirs.keys() & names.copies.keys():
        raise ValueError(f"{names.table}: both a weight and a copy: {listed(sorted(twice))}")


@dataclass(frozen=True)
class _Numbers:
    """What the placeholders of a pattern may stand for."""

    blocks: int
    mtp: int

    def regex(self, pattern: str) -> re.Pattern[str]:
        """Fits the names that a pattern stands for; a * at its end stands for anything."""
        own = "|".join(map(str, range(self.blocks + self.mtp)))
        ahead = "|".join(map(str, range(self.blocks, self.blocks + self.mtp)))
        kinds = {
            "{layer}": f"(?P<layer>{own})",
            "{mtp}": f"(?P<mtp>{ahead})" if ahead else "(?!)",
            "{beyond}": rf"(?P<beyond>(?!(?:{own})\b)\d+)",
            "{expert}": r"\d+",
            "*": ".*",
        }
        pieces = re.split(r"(\{\w+\}|\*)", pattern)
        return re.compile("".join(kinds.get(piece, re.escape(piece)) for piece in pieces))

    def all_of(self, pattern: str) -> Iterator[str]:
        """Every name that a pattern stands for; of placeholders it may have {mtp}."""
        if "{mtp}" not in pattern:
            yield pattern
        else:
            for number in range(self.blocks, self.blocks + self.mtp):
                yield pattern.format(mtp=number)


def listed(names: Iterable[str]) -> str:
    """The first few of them, for a message."""
    names = list(names)
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
