"""A Hugging Face folder as it lies on disk: which tensor is in which file, and of what it is made.

Quantised tensors count as one, of the shape and orientation that they have once dequantised.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titan_moe.hf.names import Shape, listed
from titan_moe.hf.quantised import BLOCK, from_fp8, from_mxfp4

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
FP8_SCALE, MXFP4_BLOCKS, MXFP4_SCALES = "_scale_inv", "_blocks", "_scales"

Range = tuple[int, int]  # first, and one past the last
ReadRaw = Callable[["Raw", list[Range]], Tensor]


@dataclass(frozen=True)
class Raw:
    """One entry of one file."""

    name: str
    file: str
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class Stored:
    """One tensor, whose numbers are in `data`, times `scales` if it is quantised.

    block: rows and columns of an FP8 tensor that share a scale; None with scales: MXFP4.
    """

    data: Raw
    scales: Raw | None = None
    block: tuple[int, int] | None = None

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
        if self.block is not None:
            return from_fp8(self.data, self.scales, self.block, ranges, read)
        return from_mxfp4(self.data, self.scales, ranges, read)


@dataclass(frozen=True)
class Folder:
    """A folder whose files are all there, whole, and as the index says."""

    path: Path
    tensors: dict[str, Stored]
    config: dict[str, Any]

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: stored.shape for name, stored in self.tensors.items()}


def open_folder(path: str | Path) -> Folder:
    """Read config, index and every file's header.

    Raises:
        ValueError: no such folder, not a Hugging Face one, a file that is missing, cut short or no
            safetensors, a tensor that the index puts where it is not, or one quantised in a way
            that is not known here.
    """
    path = Path(path)
    config = read_json(path / CONFIG, path)
    quantisation = config.get("quantization_config") or {}
    method = quantisation.get("quant_method")
    if method not in (None, "fp8", "mxfp4"):
        raise ValueError(
            f"{path / CONFIG}: quantization_config.quant_method = {method!r}: only fp8 and mxfp4 "
            "are read; dequantise the weights first"
        )
    raw: dict[str, Raw] = {}
    for file in _files(path):
        raw |= _header(path, file)
    block = tuple(quantisation.get("weight_block_size") or BLOCK)
    if len(block) != 2:
        raise ValueError(f"{path / CONFIG}: weight_block_size = {list(block)}: not two numbers")
    return Folder(path, _put_together(raw, block, path), config)


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


def _files(path: Path) -> list[str]:
    """Names of the files with weights, each of which is there."""
    if not (path / INDEX).is_file():
        if not (path / SINGLE).is_file():
            raise ValueError(f"{path}: neither {INDEX} nor {SINGLE} in it")
        return [SINGLE]
    index = read_json(path / INDEX, path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ValueError(f"{path / INDEX}: damaged: no weight_map")
    files = sorted(set(index.values()))
    if missing := [file for file in files if not (path / file).is_file()]:
        raise ValueError(f"{path}: {INDEX} names files that are not there: {listed(missing)}")
    headers = {file: _header(path, file) for file in files}
    misplaced = [name for name, file in index.items() if name not in headers[file]]
    if misplaced:
        where = f"{index[misplaced[0]]} has no such tensor"
        raise ValueError(f"{path / INDEX}: {listed(misplaced)}: {where}")
    return files


def _header(path: Path, file: str) -> dict[str, Raw]:
    try:
        with safe_open(path / file, framework="pt") as tensors:
            found = {}
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                entry = tensors.get_slice(name)
                dtype = DTYPES.get(entry.get_dtype())
                if dtype is None:
                    raise ValueError(f"{path / file}: {name} is of type {entry.get_dtype()}")
                found[name] = Raw(name, file, tuple(entry.get_shape()), dtype)
            return found
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path / file}: cut short, or no safetensors file: {error}") from None


def _put_together(raw: dict[str, Raw], block: tuple[int, ...], path: Path) -> dict[str, Stored]:
    """Quantised tensors and their scales become one."""
    tensors: dict[str, Stored] = {}
    for name, entry in raw.items():
        base = name.removesuffix(MXFP4_BLOCKS)
        if base + MXFP4_BLOCKS == name and (scales := raw.get(base + MXFP4_SCALES)):
            if scales.shape != entry.shape[:-1]:
                raise ValueError(f"{path}: {scales.name} does not fit {name}'s blocks")
            tensors[base] = Stored(entry, scales)
        elif entry.dtype == torch.float8_e4m3fn:
            fp8_scales = raw.get(name + FP8_SCALE)
            if fp8_scales is None:
                raise ValueError(f"{path}: {name} is FP8, but there is no {name}{FP8_SCALE}")
            grid = tuple(-(-size // n) for size, n in zip(entry.shape, block, strict=True))
            if fp8_scales.shape != grid:
                raise ValueError(
                    f"{path}: {fp8_scales.name} is {list(fp8_scales.shape)}; blocks of "
                    f"{' × '.join(map(str, block))} make it {list(grid)}"
                )
            tensors[name] = Stored(entry, fp8_scales, (block[0], block[1]))
        else:
            tensors[name] = Stored(entry)
    used = {stored.scales.name for stored in tensors.values() if stored.scales}
    return {name: stored for name, stored in tensors.items() if name not in used}
