"""Nouns in the number that they have."""

import pytest

from titan_moe.config.words import counted


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [
        (0, "row", "0 rows"),
        (1, "row", "1 row"),
        (2, "row", "2 rows"),
        (1, "micro-batch", "1 micro-batch"),
        (8, "micro-batch", "8 micro-batches"),
        (2, "process", "2 processes"),
    ],
)
def test_counted(number: int, noun: str, said: str) -> None:
    assert counted(number, noun) == said
