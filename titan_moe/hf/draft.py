"""A folder that comes to be whole or not at all: written beside its place, then renamed to it."""

import fcntl
import logging
import os
import shutil
from pathlib import Path

from titan_moe.checkpoint.folder import sync_directory

logger = logging.getLogger(__name__)

PARTIAL = ".partial"


def refuse_taken(target: Path) -> None:
    """Raises ValueError: what is there is not an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target}: there is something already; name a new or empty folder")


class Draft:
    """Of `target`, links in whose path are followed. All but `path` is for one process alone.

    path: of the folder to write into, from `open` to `commit` or `discard`. Locked, so that of two
        who write to one target the second is refused; a process that ends lets go of it.
    """

    def __init__(self, target: Path) -> None:
        self.target = target.resolve()
        self.path = self.target.with_name(f".{self.target.name}{PARTIAL}")
        self._lock: int | None = None

    def check(self) -> None:
        """Raises ValueError: the target is taken, or cannot be replaced by a folder of its name."""
        refuse_taken(self.target)
        if self.target == Path.cwd() or self.target.is_mount():
            raise ValueError(
                f"{self.target}: a folder that is worked in or mounted cannot be replaced; name a "
                "new one inside it"
            )

    def open(self) -> None:
        """Make it, empty. Raises ValueError: another process writes to the target. Or OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ValueError(
                f"{self.target}: another process is writing it (it holds {self.path})"
            ) from None
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s: cannot be locked (%s); let nobody else write it", self.path, error)
        self._lock = lock
        for left in self.path.iterdir():  # by one that was killed
            shutil.rmtree(left) if left.is_dir() else left.unlink()

    def commit(self) -> None:
        """It becomes the target. Raises OSError: not if something has come to be there."""
        sync_directory(self.path)
        self.path.rename(self.target)
        sync_directory(self.target.parent)
        self._close()

    def discard(self) -> None:
        """Leave nothing behind, if this process has it open."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._close()

    def _close(self) -> None:
        assert self._lock is not None
        os.close(self._lock)
        self._lock = None
