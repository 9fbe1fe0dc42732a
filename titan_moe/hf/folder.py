"""A Hugging Face folder as it lies on disk: which tensor is in which file, and of what it is made.

Quantised tensors count as one, of the shape and orientation that they have once dequantised.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titan_moe.hf.names import Shape, listed
from titan_moe.hf.quantised import BLOCK, Range, from_fp8, from_mxfp4

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
}
FLOATS = {"F64", "F32", "F16", "BF16"}
FP8_SCALE, MXFP4_BLOCKS, MXFP4_SCALES = "_scale_inv", "_blocks", "_scales"

ReadRaw = Callable[["Raw", list[Range]], Tensor]


@dataclass(frozen=True)
class Raw:
    """One entry of one file. kind: its type, as safetensors has it."""

    name: str
    file: str
    shape: Shape
    kind: str

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.kind]


@dataclass(frozen=True)
class Stored:
    """One tensor, whose numbers are in `data`, times `scales` if it is quantised.

    block: rows and columns of an FP8 tensor that share a scale; None with scales: MXFP4.
    unreadable: why its numbers cannot be had, which matters only to who wants them; "" if they can.
    """

    data: Raw
    scales: Raw | None = None
    block: tuple[int, int] | None = None
    unreadable: str = ""

    @property
    def shape(self) -> Shape:
        if self.scales is None or self.block is not None:
            return self.data.shape
        *lead, rows, groups, half = self.data.shape
        return (*lead, groups * half * 2, rows)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.scales is not None else self.data.dtype

    def read(self, ranges: list[Range], read: ReadRaw) -> Tensor:
        """Its numbers in those ranges, one for each dimension, with no more read than they need."""
        if self.scales is None:
            return read(self.data, ranges)
        data, scales = partial(read, self.data), partial(read, self.scales)
        if self.block is not None:
            return from_fp8(ranges, data, scales, self.block)
        return from_mxfp4(ranges, data, scales)


@dataclass(frozen=True)
class Folder:
    """A folder whose files are all there, whole, and as the index says."""

    path: Path
    tensors: dict[str, Stored]
    config: dict[str, Any]

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: stored.shape for name, stored in self.tensors.items()}

    def check_readable(self, names: Iterable[str]) -> None:
        """Raises ValueError: the numbers of one of these tensors cannot be had."""
        wrong = [self.tensors[name].unreadable for name in names if name in self.tensors]
        if wrong := [reason for reason in wrong if reason]:
            raise ValueError(f"{self.path}: {listed(wrong)}")


def open_folder(path: str | Path) -> Folder:
    """Read config, index and every file's header.

    Raises:
        ValueError: no such folder, not a Hugging Face one, a key of config.json or the index that
            cannot be, a file that is missing, cut short or no safetensors, or a tensor that is not
            in the one file that the index names for it.
    """
    path = Path(path)
    config = read_json(path / CONFIG, path)
    block = _block(config.get("quantization_config"), path / CONFIG)
    return Folder(path, _put_together(_entries(path), block), config)


def _block(quantisation: Any, where: Path) -> tuple[int, int]:
    """Rows and columns that share a scale in FP8."""
    if quantisation is None:
        return BLOCK
    if not isinstance(quantisation, dict):
        raise ValueError(f"{where}: quantization_config = {quantisation!r}: not a JSON object")
    method = quantisation.get("quant_method")
    if method not in (None, "fp8", "mxfp4"):
        raise ValueError(
            f"{where}: quantization_config.quant_method = {method!r}: only fp8 and mxfp4 are read; "
            "dequantise the weights first"
        )
    match quantisation.get("weight_block_size"):
        case None:
            return BLOCK
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case other:
            raise ValueError(
                f"{where}: quantization_config.weight_block_size = {other!r}: expected two "
                "integers > 0"
            )


def read_json(file: Path, folder: Path) -> dict[str, Any]:
    """A JSON object that makes a folder a Hugging Face one. Raises ValueError: there is none."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder}: no {file.name} in it: not a Hugging Face folder") from None
    except ValueError as error:
        raise ValueError(f"{file}: damaged: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: damaged: not a JSON object")
    return content


def _entries(path: Path) -> dict[str, Raw]:
    """All tensors of the folder, each in the file that the index names for it and in no other."""
    if not (path / INDEX).is_file():
        if not (path / SINGLE).is_file():
            raise ValueError(f"{path}: neither {INDEX} nor {SINGLE} in it")
        return _header(path, SINGLE)
    index = read_json(path / INDEX, path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ValueError(f"{path / INDEX}: damaged: no weight_map")
    for name, file in index.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(
                f"{path / INDEX}: weight_map.{name} = {file!r}: not the name of a file beside it"
            )
    files = sorted(set(index.values()))
    if missing := [file for file in files if not (path / file).is_file()]:
        raise ValueError(f"{path}: {INDEX} names files that are not there: {listed(missing)}")
    entries: dict[str, Raw] = {}
    for file in files:
        for name, raw in _header(path, file).items():
            if name in entries:
                raise ValueError(f"{path}: {name}: in two files, {entries[name].file} and {file}")
            if name not in index:
                raise ValueError(f"{path}: {name}: in {file}, but not in weight_map of {INDEX}")
            entries[name] = raw
    if wrong := [
        name for name in index if name not in entries or entries[name].file != index[name]
    ]:
        where = f"{index[wrong[0]]} has no such tensor"
        raise ValueError(f"{path / INDEX}: {listed(wrong)}: {where}")
    return entries


def _header(path: Path, file: str) -> dict[str, Raw]:
    try:
        with safe_open(path / file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {
                name: Raw(name, file, tuple(entry.get_shape()), entry.get_dtype())
                for name, entry in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path / file}: cut short, or no safetensors file: {error}") from None


def _put_together(raw: dict[str, Raw], block: tuple[int, int]) -> dict[str, Stored]:
    """Quantised tensors and their scales become one."""
    tensors: dict[str, Stored] = {}
    for name, entry in raw.items():
        base = name.removesuffix(MXFP4_BLOCKS)
        scales = raw.get(base + MXFP4_SCALES)
        if base != name and scales is not None and len(entry.shape) >= len("RGN"):
            fits = scales.shape == entry.shape[:-1] and {scales.kind, entry.kind} == {"U8"}
            wrong = "" if fits else f"{scales.name} does not fit {name}'s blocks"
            tensors[base] = Stored(entry, scales, unreadable=wrong)
        elif entry.kind == "F8_E4M3":
            tensors[name] = _fp8(entry, raw.get(name + FP8_SCALE), block)
        else:
            wrong = f"{name}: its numbers are {entry.kind}, and nothing says how they are quantised"
            tensors[name] = Stored(entry, unreadable="" if entry.kind in FLOATS else wrong)
    used = {stored.scales.name for stored in tensors.values() if stored.scales}
    return {name: stored for name, stored in tensors.items() if name not in used}


def _fp8(entry: Raw, scales: Raw | None, block: tuple[int, int]) -> Stored:
    wrong = ""
    if scales is None:
        wrong = f"{entry.name} is FP8, but there is no {entry.name}{FP8_SCALE}"
    elif len(entry.shape) != len(block):
        wrong = f"{entry.name} is FP8 and {list(entry.shape)}: only matrices are in blocks"
    else:
        grid = tuple(-(-size // n) for size, n in zip(entry.shape, block, strict=True))
        if scales.shape != grid or scales.kind not in {*FLOATS, "F8_E8M0"}:
            wrong = (
                f"{scales.name} is {scales.kind} {list(scales.shape)}; blocks of "
                f"{' × '.join(map(str, block))} make it floats {list(grid)}"
            )
    return Stored(entry, scales, block, wrong)
