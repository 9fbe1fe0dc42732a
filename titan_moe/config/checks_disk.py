"""Rows of the table of checks that look at the machine which the run starts on."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from titan_moe.config.checks_data import BUILTINS
from titan_moe.config.errors import Fault
from titan_moe.config.sections import RunConfig, Source, ValidationSet

Faults = Iterator[Fault]

FILE_ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".txt", ".gz", ".zst")
LONGEST_NAME_BYTES = 255
LOGS = "logs"  # where a run's processes write, below its folder
MARKER = "COMMITTED"  # the file that tells a complete checkpoint


def local_paths_exist(config: RunConfig, world: int | None) -> Faults:
    data = config.data
    if data.tokenizer != "byte" and not os.path.isfile(data.tokenizer):
        yield Fault("data.tokenizer", 'no such file; expected "byte" or a tokenizer.json')
    entries: list[tuple[str, Source | ValidationSet]] = [
        *((f"data.sources.{i}.path", source) for i, source in enumerate(data.sources)),
        *((f"validation.sets.{i}.path", entry) for i, entry in enumerate(config.validation.sets)),
    ]
    for key, entry in entries:
        path = entry.path
        if path is None or os.path.exists(path) or path in BUILTINS:
            continue
        if path.startswith("builtin:"):
            yield Fault(key, f"no such built-in data; there is {', '.join(BUILTINS)}")
        elif entry.format == "auto" and _is_local(path):
            yield Fault(key, 'no such file or folder; for a data set on the hub, format = "hub"')
        elif entry.format not in ("auto", "hub"):
            yield Fault(key, "no such file or folder")


def _is_local(path: str) -> bool:
    """Whether a path that does not exist cannot be a hub data set, owner/name, either."""
    return path.endswith(FILE_ENDINGS) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path)


def run_folder_can_be_made(config: RunConfig, world: int | None) -> Faults:
    logs = Path(config.job.dump_folder, config.job.name, LOGS)
    there = next(path for path in (logs, *logs.parents) if os.path.lexists(path))
    if any(len(os.fsencode(name)) > LONGEST_NAME_BYTES for name in logs.parts):
        message = f"a name in it is longer than {LONGEST_NAME_BYTES} bytes"
        yield Fault("job.dump_folder", message)
    elif not there.is_dir():
        yield Fault("job.dump_folder", f"{there} is not a folder")
    elif not os.access(there, os.W_OK | os.X_OK):
        yield Fault("job.dump_folder", f"nothing may be written into {there}")


def initial_weights_are_there(config: RunConfig, world: int | None) -> Faults:
    section = config.checkpoint
    path = section.initial_load_path
    own = Path(config.job.dump_folder, config.job.name, section.folder)
    if path is None or (section.enable and os.path.isdir(own) and any(own.glob("step-*"))):
        return
    if not os.path.isdir(path):
        yield Fault("checkpoint.initial_load_path", "no such folder")
    elif section.initial_load_in_hf:
        if wanted := _missing_of_hf(Path(path)):
            message = f"not a Hugging Face folder, with {wanted} in it"
            yield Fault("checkpoint.initial_load_path", message)
    elif not os.path.isfile(os.path.join(path, MARKER)):
        yield Fault(
            "checkpoint.initial_load_path", f"not a complete checkpoint, with a file {MARKER} in it"
        )


def _missing_of_hf(folder: Path) -> str | None:
    if not (folder / "config.json").is_file():
        return "config.json"
    weights = ("model.safetensors.index.json", "model.safetensors")
    return None if any((folder / name).is_file() for name in weights) else " or ".join(weights)


def tokenizer_fits(config: RunConfig, world: int | None) -> Faults:
    data = config.data
    ids = ids_in(data.tokenizer)
    if not ids:
        return
    if config.model.vocab_size <= max(ids.values()):
        message = f"less than the {max(ids.values()) + 1} ids of {data.tokenizer}"
        yield Fault("model.vocab_size", message)
    for key, token in (("bos_token", data.bos_token), ("eos_token", data.eos_token)):
        if token is not None and token not in ids:
            yield Fault(f"data.{key}", f"not among the tokens of {data.tokenizer}")


def ids_in(tokenizer: str) -> dict[str, int]:
    """The id of each token of a tokenizer.json. Empty where it is none: the file that is missing
    is another row's, and what is wrong with its content is best told by who knows the format."""
    try:
        tree = json.loads(Path(tokenizer).read_bytes())
        vocab = tree["model"]["vocab"]  # token -> id, or [token, score] in the order of the ids
        if isinstance(vocab, list):
            vocab = {token: index for index, (token, _) in enumerate(vocab)}
        added = {token["content"]: token["id"] for token in tree.get("added_tokens", ())}
        return {token: int(index) for token, index in (added | vocab).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
