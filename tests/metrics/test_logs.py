"""Who speaks where."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_moe.metrics.logs import setup_logging


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in (None, "titan_moe", "__main__")]
    levels = [logger.level for logger in loggers]
    yield
    for handler in [handler for handler in loggers[0].handlers if handler.name == "titan-moe"]:
        loggers[0].removeHandler(handler)
        handler.close()
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def speak() -> None:
    for name in ("titan_moe.data", "__main__", "somebody.else"):
        logging.getLogger(name).info("news of %s", name)
        logging.getLogger(name).warning("trouble of %s", name)


def test_first_rank_speaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(0)
    setup_logging(0, tmp_path / "logs")
    speak()
    written = capsys.readouterr()
    assert written.out.splitlines() == [
        "news of titan_moe.data",
        "trouble of titan_moe.data",
        "news of __main__",
        "trouble of __main__",
        "trouble of somebody.else",
    ]
    assert written.err == ""
    kept = (tmp_path / "logs" / "rank0.log").read_text().splitlines()
    assert len(kept) == 5
    assert kept[1].endswith(" WARNING titan_moe.data: trouble of titan_moe.data")


def test_other_ranks_complain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(3, tmp_path)
    speak()
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.splitlines() == [
        "[rank 3] trouble of titan_moe.data",
        "[rank 3] trouble of __main__",
        "[rank 3] trouble of somebody.else",
    ]
    assert "news of titan_moe.data" in (tmp_path / "rank3.log").read_text()
