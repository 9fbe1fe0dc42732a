"""From one of our checkpoints to a folder that transformers and serving stacks load.

File after file: what is in memory at a time is one file to be written, and one chunk of those that
the checkpoint was saved in.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from titan_moe.checkpoint.folder import read_train_state, sync_directory
from titan_moe.config.model import ModelConfig
from titan_moe.config.recipe_config import model_config_of
from titan_moe.config.sections import Data
from titan_moe.config.words import counted
from titan_moe.data.tokenizer import Tokenizer, tokenizer_of
from titan_moe.hf.config_json import config_json
from titan_moe.hf.folder import CONFIG, INDEX
from titan_moe.hf.names import Names, Part, Shape, names_of
from titan_moe.hf.tokenizer_files import write_tokenizer
from titan_moe.hf.values import CheckpointValues, ModelValues, Values
from titan_moe.recipe import Recipe, load_recipe
from titan_moe.world import gather, on_first_rank

logger = logging.getLogger(__name__)

Dtype = Literal["bfloat16", "float32"]
DEFAULT_SHARD_BYTES = 5_000_000_000
PARTIAL = ".partial"


def export(
    checkpoint: str | Path,
    target: str | Path,
    *,
    dtype: Dtype = "bfloat16",
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write `checkpoint`, a step-N folder, to `target`. Collective, the ranks sharing the files;
    without a process group, of one process.

    dtype: of all tensors but those that the recipe's table keeps in fp32.
    shard_bytes: of a file, at most, unless a single tensor is larger.
    group: of all ranks, where they wait for each other's files; the world's by default.

    Raises:
        ValueError: no complete checkpoint; one whose tensors are not the model's; a tensor that
            the table does not cover; values that would be lost; a target that is not empty.
    """
    checkpoint = Path(checkpoint)
    state = on_first_rank(lambda: read_train_state(checkpoint), group)
    keys = state["config"]
    name = keys["model"]["recipe"]
    cfg = model_config_of(name).model_validate(keys["model"])
    values = CheckpointValues(checkpoint)
    out = _Output(Path(target), dtype, shard_bytes, Data(**keys["data"]), group)
    _write(values, load_recipe(name), cfg, out)
    logger.info("exported %s to %s", checkpoint, target)


def export_model(
    model: nn.Module,
    recipe: Recipe,
    cfg: ModelConfig,
    target: str | Path,
    *,
    dtype: Dtype = "float32",
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """The same of a whole model in this process's memory, without a tokenizer."""
    _write(ModelValues(model), recipe, cfg, _Output(Path(target), dtype, shard_bytes))


@dataclass(frozen=True)
class _Output:
    """Where to and how. See `export`."""

    target: Path
    dtype: Dtype
    shard_bytes: int
    data: Data | None = None
    group: dist.ProcessGroup | None = None


@dataclass
class File:
    """One to be written: shape and type of each tensor."""

    tensors: dict[str, tuple[Shape, torch.dtype]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(_bytes(shape, dtype) for shape, dtype in self.tensors.values())


def plan_files(names: Names, dtype: Dtype, shard_bytes: int) -> dict[str, File]:
    """All tensors, in the model's order, over as few files as hold them."""
    files = [File()]
    shapes = names.theirs | {copy: names.ours[ours] for copy, ours in names.copies.items()}
    for name, shape in shapes.items():
        kind = torch.float32 if name in names.float32 else getattr(torch, dtype)
        if files[-1].tensors and files[-1].bytes + _bytes(shape, kind) > shard_bytes:
            files.append(File())
        files[-1].tensors[name] = shape, kind
    count = len(files)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": file
        for number, file in enumerate(files, start=1)
    }


def _write(
    values: Values,
    recipe: Recipe,
    cfg: ModelConfig,
    out: _Output,
) -> None:
    names, target, data = names_of(recipe, cfg), out.target, out.data
    draft = target.with_name(f".{target.name}{PARTIAL}")
    tokenizer = tokenizer_of(data) if data else None

    def prepare() -> None:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"{target}: there is something already; name a new or empty folder")
        values.check(names)
        _refuse_loss(values, names, recipe)
        shutil.rmtree(draft, ignore_errors=True)  # of an export that was killed
        draft.mkdir(parents=True)

    on_first_rank(prepare, out.group)
    files = plan_files(names, out.dtype, out.shard_bytes)
    _raise_together(lambda: _write_share(values, names, files, draft), out.group)

    def finish() -> None:
        _write_json(draft / INDEX, _index(files))
        _write_json(draft / CONFIG, _config(recipe, cfg, out.dtype, tokenizer))
        if data and tokenizer:
            write_tokenizer(data, tokenizer, draft, max_length=cfg.max_seq_len)
            ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
            known = {key: token for key, token in ids.items() if token is not None}
            _write_json(draft / "generation_config.json", known)
        for name in files:  # safetensors lets nobody else read them
            shutil.copymode(draft / INDEX, draft / name)
        if target.exists():
            target.rmdir()
        sync_directory(draft)
        draft.rename(target)
        sync_directory(target.parent)

    on_first_rank(finish, out.group)
    total = sum(file.bytes for file in files.values())
    size = f"{total / 1e9:.3g} GB in {counted(len(files), 'file')}"
    logger.info("%s: %s, %s", target, counted(len(names.theirs), "tensor"), size)


def _write_share(values: Values, names: Names, files: dict[str, File], folder: Path) -> None:
    """The ranks take turns, file by file."""
    sources: dict[str, list[Part]] = {}
    for part in (part for parts in names.parts.values() for part in parts):
        sources.setdefault(part.theirs, []).append(part)
    for copy, ours in names.copies.items():
        sources[copy] = [Part(ours, copy)]
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for name in list(files)[rank::ranks]:
        buffers = {
            tensor: torch.empty(shape, dtype=dtype)
            for tensor, (shape, dtype) in files[name].tensors.items()
        }
        values.fill([(part, buffers[tensor]) for tensor in buffers for part in sources[tensor]])
        save_file(buffers, folder / name, metadata={"format": "pt"})


def _raise_together(act: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Collective. Raises ValueError on every rank: what went wrong on any."""
    wrong = None
    try:
        act()
    except (ValueError, OSError, RuntimeError) as error:
        wrong = str(error)
    told = [text for text in gather(wrong, group) if text is not None]
    if told:
        raise ValueError("; ".join(sorted(set(told))))


def _refuse_loss(values: Values, names: Names, recipe: Recipe) -> None:
    """Raises ValueError: a tensor without a place on their side is not zero, as it should be."""
    for name in (name for name, must_be_zero in names.only_ours.items() if must_be_zero):
        nonzero = int(values.tensor(name).count_nonzero())
        if nonzero:
            raise ValueError(
                f"{name}: not zero in {counted(nonzero, 'place')}, and "
                f"{recipe.load_hf().architecture} has no place for it: what the model computes "
                "would change"
            )


def _index(files: dict[str, File]) -> dict[str, Any]:
    where = {tensor: name for name, file in files.items() for tensor in file.tensors}
    total = sum(file.bytes for file in files.values())
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}


def _config(
    recipe: Recipe, cfg: ModelConfig, dtype: Dtype, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    bos, eos = (tokenizer.bos_id, tokenizer.eos_id) if tokenizer else (None, None)
    return config_json(recipe.load_hf(), cfg, dtype=dtype, bos=bos, eos=eos)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    return int(torch.Size(shape).numel()) * dtype.itemsize
