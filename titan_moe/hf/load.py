"""Weights from a Hugging Face folder into a model, under whatever layout it has been built."""

import logging
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from titan_moe.checkpoint.state import MODEL, fill_copies, model_tensors
from titan_moe.config.model import ModelConfig
from titan_moe.hf.config_json import check_config
from titan_moe.hf.folder import CONFIG, Folder, open_folder
from titan_moe.hf.names import Names, names_of
from titan_moe.hf.reader import Files, HuggingFaceReader
from titan_moe.recipe import Recipe
from titan_moe.world import on_first_rank

logger = logging.getLogger(__name__)

SAMPLES = 64  # rows of a copy that are compared


def load_weights(
    parts: list[nn.Module],
    path: str | Path,
    recipe: Recipe,
    cfg: ModelConfig,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Fill this rank's parts, in place. Collective; without a process group, of one process.

    Every rank reads the slices that it holds, file by file, and no others. Tensors of ours that
    have no place on their side keep the values that they have. Floats are cast.

    Returns the bytes that this rank asked of the files.

    Raises:
        ValueError: the folder is not a whole Hugging Face folder, or of another model, or the
            table does not cover all of it, by name. Nothing has been changed then, unless a file
            turned out to be damaged while it was read.
    """
    folder, names = on_first_rank(lambda: open_checked(path, recipe, cfg), group)
    reader = HuggingFaceReader(folder, names)
    tensors = {
        name: tensor
        for name, tensor in model_tensors(parts).items()
        if name.removeprefix(MODEL) not in names.only_ours
    }
    try:
        alone = not dist.is_initialized()
        dcp_load(tensors, storage_reader=reader, process_group=group, no_dist=alone)
    except CheckpointException as error:
        reasons = "; ".join(
            f"rank {rank}: {failure[0]!r}" for rank, failure in sorted(error.failures.items())
        )
        raise ValueError(f"{folder.path} cannot be read: {reasons}") from error
    fill_copies(parts, None)
    logger.info("weights loaded from %s: %.3g GB read", path, reader.bytes_asked / 1e9)
    return reader.bytes_asked


def open_checked(path: str | Path, recipe: Recipe, cfg: ModelConfig) -> tuple[Folder, Names]:
    """A folder that `cfg`'s model can start from, and the names on both sides.

    Raises ValueError: see `load_weights`.
    """
    folder, names = open_folder(path), names_of(recipe, cfg)
    table = recipe.load_hf()
    check_config(table, cfg, folder.config, str(folder.path / CONFIG))
    ahead = folder.config.get(table.keys.get("num_mtp_layers", ""))
    names.check(folder.shapes, str(folder.path), layers=cfg.num_layers + (ahead or 0))
    folder.check_readable(names.theirs)
    folder.check_readable(names.copies)
    _check_copies(folder, names)
    return folder, names


def _check_copies(folder: Folder, names: Names) -> None:
    """Raises ValueError: a second name for one of our tensors has numbers of its own, which would
    be lost. SAMPLES of its rows are read: one that was trained apart differs in nearly all."""
    for copy, ours in names.copies.items():
        if copy not in folder.tensors:
            continue
        [part] = names.parts[ours]
        rows, columns = names.ours[ours]
        sampled = sorted({rows - 1, *range(0, rows, -(-rows // SAMPLES))})
        ranges = [[(row, row + 1), (0, columns)] for row in sampled]
        with ExitStack() as stack:
            files = Files(folder.path, stack)
            one, other = (
                torch.cat([folder.tensors[name].read(each, files.read) for each in ranges])
                for name in (copy, part.theirs)
            )
        same = torch.equal(one.to(other.dtype), other) or torch.equal(one, other.to(one.dtype))
        if not same:
            raise ValueError(
                f"{folder.path}: {copy}: its numbers are not those of {part.theirs}, which stands "
                "for both in the model"
            )
