"""Fixtures that every room's tests share."""

from collections.abc import Iterator

import pytest

from titan_moe.check.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Gloo processes for cases that need more than one rank; started when first used."""
    pool = Pool(size=8)
    yield pool
    pool.close()
