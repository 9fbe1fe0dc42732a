"""What every table of a recipe TOML shares: frozen, strictly typed, closed to unknown keys."""

import os.path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


class Section(BaseModel):
    """One TOML table. Values are typed strictly (no "1000" for 1000), finite, and never change.

    A key that may be absent is `X | None = None`: TOML cannot write None, so no other default
    could be taken back. A TOML array is a `list`, or a `tuple` with `Field(strict=False)`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


NO_NUL = "a path holds no NUL character"


def _path(text: str) -> str:
    """A path as every reader of the config is to see it: `~` is the home folder."""
    if "\0" in text:
        raise ValueError(NO_NUL)
    return os.path.expanduser(text)


FilePath = Annotated[str, AfterValidator(_path)]
