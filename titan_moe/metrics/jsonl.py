"""A file of JSON lines that survives kills: whole lines only, cut back when a run resumes."""

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class JsonLines:
    """Records with a `step`, one per line, appended in single unbuffered writes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        """Add a line. Numbers that are not finite become null, for JSON has no others."""
        line = json.dumps(_finite(record), allow_nan=False) + "\n"
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode())

    def values(self, step: int, key: str) -> list[Any]:
        """`key` of each record of `step`."""
        if not self.path.exists():
            return []
        records = map(json.loads, self.path.read_text(encoding="utf-8").splitlines())
        return [record[key] for record in records if record["step"] == step]

    def truncate(self, step: int) -> None:
        """Keep the records up to `step`; a torn line goes too. Whole or not at all."""
        if not self.path.exists():
            return
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _is_up_to(line, step)]
        if kept == lines:
            return
        logger.info("%s: %d lines kept, %d cut", self.path, len(kept), len(lines) - len(kept))
        draft = self.path.with_name(self.path.name + ".tmp")
        draft.write_bytes(b"".join(kept))
        os.replace(draft, self.path)


def _is_up_to(line: bytes, step: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
