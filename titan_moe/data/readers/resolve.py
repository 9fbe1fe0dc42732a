"""From what `[[data.sources]]` says to the reader that it means."""

import re
from pathlib import Path

from titan_moe.config.sections import Source, ValidationSet
from titan_moe.data.readers.base import FilesReader, Listing, Reader, files_below
from titan_moe.data.readers.columns import ArrowReader, ParquetReader
from titan_moe.data.readers.hub import HubReader, is_hub_folder
from titan_moe.data.readers.jsonl import JsonlReader
from titan_moe.data.readers.text import TextReader, python_stdlib

BUILTIN = {"builtin:python-stdlib": python_stdlib}
ENDINGS = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "text": (".txt", ".text", ".md"),
}
COMPRESSED = (".gz", ".zst")
# What `datasets` and big-data writers leave beside the data: beginnings of names, and names.
HIDDEN = (".", "_")
COMPANIONS = {"dataset_info.json", "dataset_dict.json", "state.json"}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def open_reader(section: Source | ValidationSet) -> Reader:
    """The reader of a source or a validation set. Opens no document yet.

    Raises ValueError for a path that is not there, an empty file or folder, an ending that says
    nothing, formats mixed in one folder, a broken or circular link, or a builtin that is not there.
    """
    assert section.path is not None, "only sets with a path of their own are opened"
    where = f"source {section.name!r}"
    if section.path.startswith("builtin:"):
        if section.path not in BUILTIN:
            raise ValueError(f"{where}: no {section.path!r}; there is {', '.join(BUILTIN)}")
        return BUILTIN[section.path]()
    path = Path(section.path)
    if section.format == "hub" or (section.format == "auto" and _is_hub(section.path, path)):
        return HubReader(section.path, section.subset, section.split, section.text_field)
    if not path.exists():
        raise ValueError(
            f"{where}: no file or folder {section.path!r} "
            f"(in {Path.cwd()}); for a data set on the hub set format = 'hub'"
        )
    listing = _list_files(path, section.format, where)
    kind = section.format if section.format != "auto" else _common_format(listing, where)
    _check_not_empty(listing, kind, where)
    return _of_files(kind, listing, section.text_field)


def _of_files(kind: str, listing: Listing, text_field: str) -> FilesReader:
    match kind:
        case "jsonl":
            return JsonlReader(listing, text_field)
        case "parquet":
            return ParquetReader(listing, text_field)
        case "arrow":
            return ArrowReader(listing, text_field)
    assert kind == "text", f"unknown format {kind}"
    return TextReader(listing)


def _is_hub(name: str, path: Path) -> bool:
    """Whether `auto` means a hub data set: one laid out in a local folder, or owner/name."""
    if path.exists():
        return path.is_dir() and is_hub_folder(path)
    return HUB_NAME.fullmatch(name) is not None and _format_of(name) is None


def _format_of(name: str) -> str | None:
    """What a file's ending says; None: nothing."""
    lower = name.lower()
    for ending in COMPRESSED:
        if lower.endswith(ending):
            return "jsonl" if lower.removesuffix(ending).endswith(ENDINGS["jsonl"]) else None
    return next((kind for kind, endings in ENDINGS.items() if lower.endswith(endings)), None)


def _list_files(path: Path, wanted: str, where: str) -> Listing:
    """The file itself; or all files below the folder, those of `wanted` if it has endings.

    Linked folders are followed.
    """
    if path.is_file():
        return Listing.of(path.parent, [path.name])
    files = [file for file in files_below(path, HIDDEN, follow=True) if file.name not in COMPANIONS]
    names = sorted(file.relative_to(path).as_posix() for file in files)
    if wanted in ENDINGS and wanted != "text":
        names = [name for name in names if _format_of(name) == wanted]
    if not names:
        what = "files" if wanted == "auto" else f"{wanted} files"
        raise ValueError(f"{where}: no {what} in folder {path}")
    return Listing.of(path, names)


def _common_format(listing: Listing, where: str) -> str:
    by_format: dict[str, str] = {}
    for name in listing.names:
        kind = _format_of(name)
        if kind is None:
            raise ValueError(
                f"{where}: the ending of {listing.root / name} names no known format; set format"
            )
        by_format.setdefault(kind, name)
    if len(by_format) > 1:
        found = ", ".join(f"{kind} ({name})" for kind, name in by_format.items())
        raise ValueError(f"{where}: folder {listing.root} mixes formats: {found}; set format")
    return next(iter(by_format))


def _check_not_empty(listing: Listing, kind: str, where: str) -> None:
    """A file without a byte holds no document, except as one text of several."""
    if kind == "text":
        if not any(listing.sizes_bytes):
            raise ValueError(f"{where}: {listing.root / listing.names[0]} is empty")
        return
    for path, size in zip(listing.paths(), listing.sizes_bytes, strict=True):
        if size == 0:
            raise ValueError(f"{where}: {path} is empty")
