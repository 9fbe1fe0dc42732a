"""Tables of a TOML document, typed; and whole files that are no run's: a machine, for example."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from titan_moe.config.base import Section
from titan_moe.config.errors import ConfigError
from titan_moe.config.faults import faults_of
from titan_moe.config.files import Document, read_document
from titan_moe.config.keys import Sections, tables_in
from titan_moe.config.overrides import unknown_key

Whole = TypeVar("Whole", bound=Section)


def load_tables(path: str | Path, whole: type[Whole]) -> Whole:
    """Read and type a TOML file whose every key is in a table. It may extend others.

    whole: the section of the file; each of its fields is a table, a Section.

    Raises ConfigError (a ValueError) with one line per fault: file, key, value, remedy.
    """
    document = read_document(Path(path))
    sections = {name: tables_in(info.annotation)[0] for name, info in whole.model_fields.items()}
    parts, faults = typed_tables(document, sections, known=sections)
    if faults:
        raise ConfigError(faults)
    return whole(**parts)


def typed_tables(
    document: Document, sections: Sections, known: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Type every top-level table. Returns the typed tables, and a line per fault.

    known: names that a top-level table may have, be its class among `sections` or not.
    """
    faults = [
        f"{document.origin((name,))}: {unknown_key(sections, (name,))}"
        for name in document.tree
        if name not in known
    ]
    parts: dict[str, BaseModel] = {}
    for name, section in sections.items():
        try:
            parts[name] = section.model_validate(document.tree.get(name, {}))
        except ValidationError as error:
            faults += faults_of(error, name, document, sections)
    return parts, faults
