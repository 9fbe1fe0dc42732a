"""A Hugging Face folder turned into a checkpoint of ours, by as many processes as it takes."""

import json
import logging
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.elastic.multiprocessing.errors import get_error_handler, record

from titan_moe.checkpoint import folder as disk
from titan_moe.checkpoint.state import model_tensors
from titan_moe.config import ConfigError, RunConfig, load_config
from titan_moe.config.layout import Layout
from titan_moe.hf.draft import refuse_taken
from titan_moe.hf.load import load_weights
from titan_moe.hf.names import names_of
from titan_moe.mesh import Meshes
from titan_moe.metrics.logs import setup_logging
from titan_moe.parallelize import parallelize
from titan_moe.recipe import load_recipe
from titan_moe.world import World, on_first_rank

logger = logging.getLogger(__name__)

WAIT_FOR_DISKS = timedelta(hours=1)  # of the slowest rank


def import_folder(source: str, target: str | Path, config: RunConfig, world: World) -> None:
    """Write the weights in folder `source` as checkpoint `target`. Collective.

    Each rank reads and writes its own share under the config's layout; any layout loads them, by
    `checkpoint.initial_load_path`.

    Raises:
        ValueError: see `load_weights`; or a target that is not empty.
    """
    target = Path(target)
    on_first_rank(lambda: refuse_taken(target))
    meshes = Meshes.build(Layout.of(config.parallelism, world.size), world.device.type)
    recipe = load_recipe(config.model.recipe)
    read = names_of(recipe, config.model).parts
    engine = parallelize(config, recipe, meshes, world.device, loaded=read)
    group = dist.new_group(backend="gloo", timeout=WAIT_FOR_DISKS, group_desc="checkpoint")
    load_weights(engine.parts, source, recipe, config.model, group)
    save_weights(engine.parts, target, config, group)
    logger.info("imported %s to %s", source, target)


def save_weights(
    parts: list[nn.Module],
    target: Path,
    config: RunConfig,
    group: dist.ProcessGroup | None = None,
) -> None:
    """A complete checkpoint of step 0 without an optimizer's state. Collective."""
    on_first_rank(lambda: target.mkdir(parents=True, exist_ok=True), group)
    writer = FileSystemWriter(target)
    dcp_save(model_tensors(parts), storage_writer=writer, process_group=group)
    state = {
        "schema_version": disk.SCHEMA_VERSION,
        "step": 0,
        disk.WEIGHTS_ONLY: True,
        "tokens_seen": 0,
        "config": config.model_dump(exclude_none=True),
    }

    def finish() -> None:
        disk.write_durably(target / disk.TRAIN_STATE, json.dumps(state))
        disk.commit(target, 0)

    on_first_rank(finish, group)


@record
def main(arguments: Sequence[str] | None = None) -> int:
    """`HF_DIR CHECKPOINT CONFIG [--section.key=value ...]`, on every process of torchrun's."""
    source, target, path, *overrides = sys.argv[1:] if arguments is None else arguments
    setup_logging(int(os.environ.get("RANK", "0")))
    try:
        config = load_config(path, overrides, world=int(os.environ.get("WORLD_SIZE", "1")))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    world = World.join(config.comm)
    try:
        import_folder(source, target, config, world)
    except ValueError as error:
        get_error_handler().record_exception(error)  # for torchrun's last word
        print(f"titan-moe: {error}", file=sys.stderr, flush=True)
        return 2
    world.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
