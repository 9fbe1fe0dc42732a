"""Every key of a config, with its type, its default and its line of meaning, as text."""

import textwrap
from itertools import groupby

from pydantic import BaseModel

from titan_moe.config.keys import Key, Sections, item_of, keys_of, tables_in

WIDTH = 100


def keys_text(sections: Sections) -> str:
    """The keys of all tables, a block for each table."""
    blocks = []
    for name, section in sections.items():
        for table, keys in groupby(keys_of(name, section), key=lambda key: key.table):
            blocks.append(_block(table, list(keys), sections))
    return "\n\n".join(blocks) + "\n"


def _block(table: str, keys: list[Key], sections: Sections) -> str:
    section, header = _section_at(table, sections)
    about = (section.__doc__ or "").split("\n")[0].removeprefix(f"`{header}`: ").rstrip(".:")
    column = max(len(key.name) for key in keys) + 4
    lines = [f"{header}  {about}".rstrip()]
    for key in keys:
        absent = "required" if key.required else f"default {key.default}"
        kind = key.type if not key.required and key.default is None else f"{key.type}; {absent}"
        lines += textwrap.wrap(
            f"{key.description} [{kind}]",
            width=WIDTH,
            initial_indent=f"  {key.name}".ljust(column),
            subsequent_indent=" " * column,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def _section_at(table: str, sections: Sections) -> tuple[type[BaseModel], str]:
    """The class behind a dotted table name, and the table's TOML header."""
    first, *rest = table.split(".")
    section, in_list = sections[first], False
    for name in rest:
        annotation = section.model_fields[name].annotation
        item = item_of(annotation)
        in_list = item is not None
        section = tables_in(item if in_list else annotation)[0]
    return section, f"[[{table}]]" if in_list else f"[{table}]"
