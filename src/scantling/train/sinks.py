"""Where a run's numbers may go besides its own files: TensorBoard, Weights & Biases, Trackio. None can end the run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from scantling.errors import need
from scantling.train.watch import Record, Watcher


class Spare:
    """A watcher whose failure ends it and not the run, and is said once.

    Args:
        name: of what is written, for the sentence.
        make: begins it, which may fail, too.
        say: is told the sentence.
    """

    def __init__(self, name: str, make: Callable[[], Watcher], say: Callable[[str], None]) -> None:
        self._name, self._say = name, say
        self._inner: Watcher | None = None
        self._tried(lambda: setattr(self, "_inner", make()))

    def record(self, record: Record) -> None:
        """Hand a record on, while all is well."""
        if (inner := self._inner) is not None:
            self._tried(lambda: inner.record(record))

    def close(self) -> None:
        """Close it, if it is still written."""
        if (inner := self._inner) is not None:
            self._tried(inner.close)
            self._inner = None

    def _tried(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # the disk, the network, or a library's own types
            self._inner = None
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            self._say(
                f"{self._name} is not written from here on ({reason}); the run goes on, and metrics.jsonl has all of it"
            )


class TensorBoard:
    """The numbers of records as TensorBoard's event files in RUN/tensorboard."""

    def __init__(self, run: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run / "tensorboard"))

    def record(self, record: Record) -> None:
        """Write the numbers of a record."""
        for name, value in _numbers_of(record):
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class Tracker:
    """The numbers of records to wandb or trackio; where they keep or send them is set as they document it.

    Args:
        library: ``wandb`` or ``trackio``, which have the calls init, log and finish.
        run: the folder; its name is the run's, and what wandb keeps goes there.
        project: the card's name.
        settings: the training section, as plain JSON.

    Raises:
        MissingExtra: the library is not installed.
    """

    def __init__(self, library: str, run: Path, project: str, settings: Mapping[str, Any]) -> None:
        self._library: Any = need(library, f"track a run with {library}")
        more = {"dir": str(run)} if library == "wandb" else {}
        # They greet on standard output, which is for the run's result.
        with redirect_stdout(sys.stderr):
            self._library.init(project=project, name=run.name, config=dict(settings), **more)

    def record(self, record: Record) -> None:
        """Send the numbers of a record, those of one update under its number."""
        if numbers := dict(_numbers_of(record)):
            with redirect_stdout(sys.stderr):
                self._library.log(numbers, step=record["step"])

    def close(self) -> None:
        """Say that the run is over."""
        with redirect_stdout(sys.stderr):
            self._library.finish()


def _numbers_of(record: Record) -> Iterable[tuple[str, float]]:
    """Of records with numbers for a curve, each number by the record's kind and its name."""
    if record["kind"] in ("step", "evaluation"):
        yield from _numbers(record, f"{record['kind']}/")


def _numbers(record: Record, prefix: str) -> Iterable[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
            yield f"{prefix}{name}", float(value)
