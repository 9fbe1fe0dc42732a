"""From one of our checkpoints to a folder that transformers and serving stacks load.

File after file: what is in memory at a time is one file to be written, and one chunk of those that
the checkpoint was saved in.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from titan_moe.checkpoint.folder import MARKER, TRAIN_STATE, read_train_state
from titan_moe.config.model import ModelConfig
from titan_moe.config.recipe_config import model_config_of
from titan_moe.config.sections import Data
from titan_moe.config.words import counted
from titan_moe.data.tokenizer import Tokenizer
from titan_moe.hf.config_json import config_json
from titan_moe.hf.draft import Draft
from titan_moe.hf.folder import CONFIG, INDEX
from titan_moe.hf.names import Names, Part, Shape, names_of
from titan_moe.hf.tokenizer_files import saved_tokenizer, write_tokenizer
from titan_moe.hf.values import CheckpointValues, ModelValues, Values
from titan_moe.recipe import Recipe, load_recipe
from titan_moe.world import gather, on_first_rank

logger = logging.getLogger(__name__)

Dtype = Literal["bfloat16", "float32"]
DEFAULT_SHARD_BYTES = 5_000_000_000
MARK = "titan_moe_checkpoint"  # in the index: what it is the export of

T = TypeVar("T")


def export(
    checkpoint: str | Path,
    target: str | Path,
    *,
    dtype: Dtype = "bfloat16",
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    without_mtp: bool = False,
    tokenizer: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write `checkpoint`, a step-N folder, to `target`. Collective, the ranks sharing the files;
    without a process group, of one process.

    dtype: of all tensors but those that the recipe's table keeps in fp32.
    shard_bytes: of a file, at most, unless a single tensor is larger.
    without_mtp: leave out the layers of multi-token prediction, and say so in config.json.
    tokenizer: where the run's tokenizer.json is now, if not where it was.
    group: of all ranks, where they wait for each other's files; the world's by default.

    Raises:
        ValueError: no complete checkpoint; one whose tensors are not the model's; a tensor that
            the table does not cover; values that would be lost; a tokenizer.json that is not the
            run's; a target that is not empty, or that another process writes; a disk that is full.
            Told on every rank, and nothing of the target is left.
    """
    checkpoint = Path(checkpoint)
    state = on_first_rank(lambda: read_train_state(checkpoint), group)
    keys = state["config"]["model"]
    cfg = model_config_of(keys["recipe"]).model_validate(keys)
    values = _together(lambda: CheckpointValues(checkpoint), group)
    mark = on_first_rank(lambda: mark_of(checkpoint, dtype), group)
    out = _Output(
        Path(target),
        dtype,
        shard_bytes,
        without_mtp,
        tokens=lambda: saved_tokenizer(state, checkpoint, tokenizer),
        mark={MARK: mark},
        group=group,
    )
    _write(values, load_recipe(keys["recipe"]), cfg, out)
    logger.info("exported %s to %s", checkpoint, target)


def check_exportable(recipe: Recipe, cfg: ModelConfig) -> None:
    """What can be known before a run of whether its end can be exported.

    Raises:
        ValueError: see `names_of` and `config_json`; or the run moves a bias that their side has no
            place for.
    """
    _config(recipe, cfg, "bfloat16", None)
    for name, must_be_zero in names_of(recipe, cfg).only_ours.items():
        moved = re.fullmatch(r"layers\.(\d+)\.moe\.router\.selection_bias", name)
        if moved and must_be_zero and cfg.balance(int(moved[1])).bias_update_rate > 0:
            raise ValueError(
                f"checkpoint.last_save_in_hf: model.bias_update_rate = {cfg.bias_update_rate} "
                f"moves {name}, for which {recipe.load_hf().architecture} has no place, so that "
                "the run's end could not be exported: set model.bias_update_rate = 0 (balance by "
                "model.balance_loss_weight) or leave last_save_in_hf out"
            )


def mark_of(checkpoint: Path, dtype: Dtype) -> str:
    """Tells exports of one checkpoint from those of another of the same step, as a run leaves that
    has gone back, and from those of another type. Raises OSError."""
    saved = (checkpoint / TRAIN_STATE).read_bytes()
    when = (checkpoint / MARKER).stat().st_mtime_ns
    return f"{hashlib.sha256(saved).hexdigest()[:32]}-{when}-{dtype}"


def exported_already(checkpoint: Path, target: Path, dtype: Dtype) -> bool:
    """Whether `target` is the whole export of `checkpoint`. Anything else that is there, but for an
    empty folder, gets a name ending in ".abandoned", and nothing of it is deleted.

    Raises OSError.
    """
    try:
        index = json.loads((target / INDEX).read_text(encoding="utf-8"))
        marked = index["metadata"].get(MARK) == mark_of(checkpoint, dtype)
        files = {CONFIG, *index["weight_map"].values()}
        if marked and all((target / file).is_file() for file in files):
            return True
    except (
        FileNotFoundError,
        NotADirectoryError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ):
        pass  # no index, or none of ours: no export
    if target.is_dir() and not any(target.iterdir()):
        return False
    if target.exists():
        aside, number = target.with_name(f"{target.name}.abandoned"), 2
        while aside.exists():
            aside, number = target.with_name(f"{target.name}.abandoned-{number}"), number + 1
        target.rename(aside)
        logger.warning("%s is no export of %s: renamed to %s", target, checkpoint, aside.name)
    return False


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
    without_mtp: bool = False
    tokens: Callable[[], tuple[Data, Tokenizer]] | None = None
    mark: dict[str, str] = field(default_factory=dict)
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
    draft, stored = Draft(out.target), names_of(recipe, cfg)
    names = stored
    if out.without_mtp and cfg.mtp_depth():
        logger.info("left out: %s of multi-token prediction", counted(cfg.mtp_depth(), "layer"))
        cfg = cfg.model_copy(update={"num_mtp_layers": 0})
        names = names_of(recipe, cfg)
    files = plan_files(names, out.dtype, out.shard_bytes)

    def prepare() -> None:
        draft.check()
        values.check(stored)
        _refuse_loss(values, names, recipe)
        tokenizer = out.tokens()[1] if out.tokens else None
        _config(recipe, cfg, out.dtype, tokenizer)  # refuses what config.json has no words for
        draft.open()

    def finish() -> None:
        data, tokenizer = out.tokens() if out.tokens else (None, None)
        _write_json(draft.path / INDEX, _index(files, out.mark))
        _write_json(draft.path / CONFIG, _config(recipe, cfg, out.dtype, tokenizer))
        if data and tokenizer:
            write_tokenizer(data, tokenizer, draft.path, max_length=cfg.max_seq_len)
            ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
            known = {key: token for key, token in ids.items() if token is not None}
            _write_json(draft.path / "generation_config.json", known)
        for name in files:  # safetensors lets nobody else read them
            shutil.copymode(draft.path / INDEX, draft.path / name)
        draft.commit()

    try:
        on_first_rank(prepare, out.group)
        _together(lambda: _write_share(values, names, files, draft.path), out.group)
        on_first_rank(finish, out.group)
    finally:
        draft.discard()
    total = sum(file.bytes for file in files.values())
    size = f"{total / 1e9:.3g} GB in {counted(len(files), 'file')}"
    logger.info("%s: %s, %s", out.target, counted(len(names.theirs), "tensor"), size)


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
        try:
            save_file(buffers, folder / name, metadata={"format": "pt"})
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder / name} cannot be written: {error}") from error


def _together(act: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Collective. Raises ValueError on every rank: what went wrong on any, whatever it was."""
    results, wrong = [], None
    try:
        results.append(act())
    except Exception as error:
        wrong = str(error) if isinstance(error, ValueError | OSError) else repr(error)
        logger.debug("failed", exc_info=True)
    told = [text for text in gather(wrong, group) if text is not None]
    if told:
        raise ValueError("; ".join(sorted(set(told))))
    return results[0]


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


def _index(files: dict[str, File], mark: dict[str, str]) -> dict[str, Any]:
    where = {tensor: name for name, file in files.items() for tensor in file.tensors}
    total = sum(file.bytes for file in files.values())
    return {"metadata": {"total_size": total, **mark}, "weight_map": dict(sorted(where.items()))}


def _config(
    recipe: Recipe, cfg: ModelConfig, dtype: Dtype, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    bos, eos = (tokenizer.bos_id, tokenizer.eos_id) if tokenizer else (None, None)
    return config_json(recipe.load_hf(), cfg, dtype=dtype, bos=bos, eos=eos)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    return int(torch.Size(shape).numel()) * dtype.itemsize
