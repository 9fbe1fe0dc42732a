"""The folder of one run, and the guard that keeps two models from sharing it. No torch.

<dump_folder>/<job.name>/
  config.toml          the resolved config of the latest attempt
  metrics.jsonl        one object per logged step
  validation.jsonl     one object per validation set and validation
  checkpoint/  tb/     as [checkpoint] and [metrics] name them
  logs/                rank<r>.log of each process; attempts.jsonl, a line per start of the run;
                       lock, held by the process that trains; torchrun's own files
"""

import fcntl
import json
import logging
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from titan_moe.config import RunConfig, save_config
from titan_moe.config.model import OF_TRAINING

logger = logging.getLogger(__name__)

# Beside [model], but for what steers training: what no run can change and still be the same.
IDENTITY = (
    ("data", "tokenizer"),
    ("data", "num_streams"),
    ("training", "seq_len"),
    ("debug", "seed"),
)


class RunFolder:
    """Paths of a run, and how it is entered. `attempt` counts the starts, from 1; 0 before that."""

    def __init__(self, dump_folder: str | Path, name: str) -> None:
        self.path = Path(dump_folder) / name
        self.config_file = self.path / "config.toml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.validation_file = self.path / "validation.jsonl"
        self.logs = self.path / "logs"
        self.attempt = 0
        self._lock: IO[str] | None = None

    def prepare(self, config: RunConfig) -> int:
        """Enter the folder for an attempt, on one rank; returns the attempt's number.

        Raises:
            ValueError: the folder cannot be written, another process trains in it, or it holds
                another model's run, or checkpoints that this attempt would not look at. No part of
                a run in it has been changed then.
        """
        checkpoints = self.path / config.checkpoint.folder
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            if self._holds_a_run():
                if not self.config_file.is_file():
                    raise ValueError(
                        f"{self.path}: holds a run without its {self.config_file.name}, so nobody "
                        f"can tell whose; {_REMEDY}"
                    )
                self._refuse_another_run(config)
                self._refuse_to_overlook_checkpoints(config)
            checkpoints.mkdir(parents=True, exist_ok=True)
            self.attempt = self._count_attempt()
        except OSError as error:
            raise ValueError(
                f"{error.filename or self.path}: cannot be made ready for the run "
                f"({error.strerror}); see job.dump_folder and job.name"
            ) from error
        return self.attempt

    def record(self, config: RunConfig) -> None:
        """Write config.toml, once the attempt is sure to begin."""
        save_config(config, self.config_file)

    def release(self) -> None:
        """Let others train here. A process that ends, however it ends, releases too."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_lock(self) -> None:
        path = self.logs / "lock"
        lock = path.open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ValueError(
                f"{self.path}: another process trains in this folder (it holds {path}); stop it, "
                "or choose another job.name"
            ) from None
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s: cannot be locked (%s); start no second run there", path, error)
        self._lock = lock

    def _holds_a_run(self) -> bool:
        """Whether an attempt got as far as a logged step or a checkpoint."""
        logged = self.metrics_file.is_file() and self.metrics_file.stat().st_size > 0
        return logged or any(self.path.glob("*/step-*"))

    def _refuse_to_overlook_checkpoints(self, config: RunConfig) -> None:
        """Starting over beside checkpoints would cut the metrics of the run that they belong to."""
        there = {marker.parent.parent.name for marker in self.path.glob("*/step-*/COMMITTED")}
        section = config.checkpoint
        if there and (not section.enable or section.folder not in there):
            raise ValueError(
                f"{self.path}: holds checkpoints, in {', '.join(sorted(there))}/, that "
                f"checkpoint.enable = {str(section.enable).lower()} and checkpoint.folder = "
                f"{json.dumps(section.folder)} would pass over; resume from them, or {_REMEDY}"
            )

    def _refuse_another_run(self, config: RunConfig) -> None:
        theirs, ours = self._identities(config)
        differing = [
            f"  {key}: {_shown(theirs.get(key))} there, {_shown(ours.get(key))} here"
            for key in sorted(theirs.keys() | ours.keys())
            if theirs.get(key) != ours.get(key)
        ]
        if differing:
            lines = "\n".join(differing)
            raise ValueError(
                f"{self.config_file}: this folder holds another model's run:\n{lines}\n{_REMEDY}"
            )

    def _identities(self, config: RunConfig) -> tuple[dict[str, Any], dict[str, Any]]:
        """What may not differ, stored and wanted. Keys that the stored config lacks, because it
        is older, have today's defaults; of another recipe nothing but its name is read."""
        try:
            stored = tomllib.loads(self.config_file.read_text(encoding="utf-8"))
            recipe = stored["model"]["recipe"]
            if recipe != config.model.recipe:
                return {"model.recipe": recipe}, {"model.recipe": config.model.recipe}
            sections = {
                name: type(getattr(config, name)).model_validate(stored.get(name, {})).model_dump()
                for name in ("model", *(section for section, _ in IDENTITY))
            }
        except (ValueError, KeyError, TypeError) as error:
            reason = _first_fault(error) if isinstance(error, ValidationError) else repr(error)
            raise ValueError(
                f"{self.config_file}: cannot be read by this version of titan-moe ({reason}), so "
                f"nobody can tell whether it is this run; {_REMEDY}"
            ) from error
        return _identity(sections), _identity(config.model_dump())

    def _count_attempt(self) -> int:
        """One more than any attempt that has left a trace."""
        starts = self.logs / "attempts.jsonl"
        attempt = 1 + max(_attempts_in(starts) + _attempts_in(self.metrics_file), default=0)
        line = {"attempt": attempt, "started": datetime.now(UTC).isoformat(timespec="seconds")}
        with starts.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return attempt


_REMEDY = "choose another job.name, or remove the folder"


def _identity(sections: dict[str, Any]) -> dict[str, Any]:
    model = {
        f"model.{key}": value for key, value in sections["model"].items() if key not in OF_TRAINING
    }
    return model | {f"{section}.{key}": sections[section][key] for section, key in IDENTITY}


def _shown(value: Any) -> str:
    return "absent" if value is None else json.dumps(value)


def _first_fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"


def _attempts_in(file: Path) -> list[int]:
    """Attempt numbers in a file of JSON lines; a torn line, left by a kill, tells nothing."""
    if not file.exists():
        return []
    attempts = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            attempts.append(int(json.loads(line)["attempt"]))
        except (ValueError, KeyError, TypeError):
            continue
    return attempts
