"""Lines are whole, numbers exact, and resuming cuts just what comes after."""

import json
from pathlib import Path

from titan_moe.metrics.jsonl import JsonLines


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_numbers_survive_to_the_bit(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl")
    value = 0.1 + 0.2
    lines.append({"step": 1, "loss": value, "moe": {"entropy": 1 / 3}})
    assert lines_of(lines.path) == [{"step": 1, "loss": value, "moe": {"entropy": 1 / 3}}]


def test_what_json_cannot_say_is_null(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.append({"step": 1, "loss": float("nan"), "moe": {"a": float("inf"), "b": -1.5}})
    assert lines.path.read_text() == '{"step": 1, "loss": null, "moe": {"a": null, "b": -1.5}}\n'


def test_truncate(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.truncate(3)
    assert not lines.path.exists()
    for step in (1, 2, 10, 20, 30):
        lines.append({"step": step})
    whole = lines.path.read_bytes()
    lines.truncate(20)
    assert lines.path.read_bytes() == whole[: whole.index(b'{"step": 30}')]
    lines.truncate(25)
    assert [line["step"] for line in lines_of(lines.path)] == [1, 2, 10, 20]
    lines.truncate(0)
    assert lines.path.read_bytes() == b""
    assert [path.name for path in tmp_path.iterdir()] == ["m.jsonl"]


def test_torn_last_line_goes(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.append({"step": 1})
    for torn in (b'{"step": 2, "lo', b'{"step": 2}', b"\xff\x00\n", b'"step"\n'):
        with lines.path.open("ab") as file:
            file.write(torn)
        lines.truncate(2)
        assert lines.path.read_bytes() == b'{"step": 1}\n', torn
