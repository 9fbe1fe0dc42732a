"""Checkpoint folders on disk: which are complete, and how one comes and goes. No torch.

    <folder>/step-<n>/   DCP files, train_state.json, and COMMITTED, written last

A step folder counts once its marker exists; anything else, whatever it looks like, is neither
loaded nor deleted. A folder that is to be deleted first gets a name that nothing loads, in one
atomic rename, so that a half-deleted one is never taken for complete.
"""

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
MARKER = "COMMITTED"
TRAIN_STATE = "train_state.json"
WEIGHTS_ONLY = "weights_only"  # a key of it: no optimizer's state beside them

_STEP_NAME = re.compile(r"step-(0|[1-9][0-9]*)")
_DOOMED_PREFIX = ".deleting-"

logger = logging.getLogger(__name__)


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` lives."""
    return folder / f"step-{step}"


def committed_steps(folder: Path) -> list[int]:
    """Steps of all complete checkpoints in `folder`, ascending; empty if there is no folder."""
    if not folder.is_dir():
        return []
    matches = [(_STEP_NAME.fullmatch(entry.name), entry) for entry in folder.iterdir()]
    return sorted(int(name[1]) for name, entry in matches if name and (entry / MARKER).is_file())


def commit(checkpoint: Path, step: int) -> None:
    """Declare `checkpoint` complete, after everything in it has reached the disk."""
    sync_directory(checkpoint)
    marker = {"schema_version": SCHEMA_VERSION, "step": step}
    write_durably(checkpoint / MARKER, json.dumps(marker) + "\n")
    sync_directory(checkpoint.parent)


def check_committed(checkpoint: Path) -> int:
    """The step that a complete checkpoint bears.

    Raises:
        ValueError: no such folder, no commit marker, a marker that is not ours, or a newer schema.
    """
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint}: no such checkpoint folder")
    marker = checkpoint / MARKER
    if not marker.is_file():
        raise ValueError(
            f"{checkpoint}: not a complete checkpoint (no {MARKER} in it); "
            "name a step-N folder whose save has finished"
        )
    content = read_json(marker)
    version, step = content.get("schema_version"), content.get("step")
    if not isinstance(version, int) or not isinstance(step, int):
        raise ValueError(f"{marker}: schema_version and step should be integers")
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"{marker}: schema_version {version} is newer than {SCHEMA_VERSION}, which this "
            "version of titan-moe reads; load it with the version that wrote it"
        )
    return step


def read_train_state(checkpoint: Path) -> dict[str, Any]:
    """What the loop needs to go on: step, tokens seen, data state, resolved config.

    Raises:
        ValueError: the file is missing or damaged, or bears another step than the marker.
    """
    step = check_committed(checkpoint)
    state = read_json(checkpoint / TRAIN_STATE)
    if state.get("step") != step:
        raise ValueError(f"{checkpoint / TRAIN_STATE}: step {state.get('step')} is not {step}")
    return state


def read_json(path: Path) -> dict[str, Any]:
    """A file that should hold one JSON object.

    Raises:
        ValueError: it is missing, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: missing from the checkpoint") from None
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: damaged: not a JSON object")
    return content


def set_aside(folder: Path, last_step: int) -> list[int]:
    """Rename complete checkpoints later than `last_step` to `step-<n>.abandoned`: they are of a
    branch that was left by going back, and the newest of it must not be taken for the run's newest.

    Returns their steps. Nothing is deleted; the names are never loaded.
    """
    abandoned = [step for step in committed_steps(folder) if step > last_step]
    for step in abandoned:
        path = step_folder(folder, step)
        name, number = f"{path.name}.abandoned", 2
        while path.with_name(name).exists():
            name, number = f"{path.name}.abandoned-{number}", number + 1
        path.rename(path.with_name(name))
    if abandoned:
        sync_directory(folder)
    return abandoned


def purge(folder: Path, keep: int, last_step: int) -> list[int]:
    """Delete complete checkpoints up to `last_step` beyond the newest `keep`; 0 keeps all.

    Returns the steps deleted.
    """
    if keep == 0:
        return []
    doomed = [step for step in committed_steps(folder) if step <= last_step][:-keep]
    for step in doomed:
        remove(step_folder(folder, step))
    for leftover in folder.glob(f"{_DOOMED_PREFIX}step-*"):  # of a purge that was killed
        _delete(leftover)
    return doomed


def remove(checkpoint: Path) -> None:
    """Delete a step folder of ours, complete or not, so that no half of it is ever loadable."""
    assert _STEP_NAME.fullmatch(checkpoint.name), checkpoint
    doomed = checkpoint.with_name(_DOOMED_PREFIX + checkpoint.name)
    _delete(doomed)
    checkpoint.rename(doomed)
    sync_directory(doomed.parent)
    _delete(doomed)


def _delete(path: Path) -> None:
    """A folder and all in it; of a link, the link alone."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def write_durably(path: Path, text: str) -> None:
    """Write a file so that, whatever happens, it holds either all of `text` or is not there."""
    draft = path.with_name(path.name + ".tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
