"""Every contender at every load, interleaved; medians and spreads beside what the part tree predicts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scantling.benches import account
from scantling.benches.child import Child
from scantling.benches.plan import Contender, Load
from scantling.benches.timing import Spread, interleaved
from scantling.errors import ScantlingError, ScantlingInputError
from scantling.parts.transformer import Transformer
from scantling.units import bytes_text

if TYPE_CHECKING:
    from scantling.study.calibrate import Calibration

LIBRARY = {"transformers": "transformers", "llama.cpp": "xllamacpp", "openvino": "openvino_genai"}
CALIBRATION_SECONDS = 1.0
"""For each contender, whose set of weights has a size of its own."""
ROOM = 400e6
"""Bytes of a process beside its weights and cache: torch and what it imports."""

Said = Callable[[str], object]


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        model: as the command line names it.
        initial: it has no weights, so it gets initial ones; speed does not depend on their values.
        stored: where its weights are a GGUF file, the file.
        width: of packed matrices.
    """

    model: str
    parts: Transformer
    family: str
    vocab_size: int
    initial: bool = False
    stored: Path | None = None
    revision: str | None = None
    width: str = "stored"


@dataclass(frozen=True)
class Row:
    """One contender at one load, over all rounds.

    Attributes:
        first: seconds from the ids to the first new token of every row; of an encoder to the vectors.
        step: seconds of one step of all rows; None of an encoder.
        prefill_bound, step_bound: what the roofline of this machine allows at least; None where it is not known.
        cache_bytes, cache_predicted: allocated, and by the account; None where nobody tells.
        resident: the most that the contender's process held during these rounds, its libraries included.
    """

    contender: Contender
    load: Load
    first: Spread
    step: Spread | None
    prefill: account.Account
    decode: account.Account | None
    prefill_bound: float | None
    step_bound: float | None
    cache_bytes: int | None
    cache_predicted: int | None
    resident: int | None

    @property
    def prefill_rate(self) -> Spread:
        """Tokens of prompts per second, all rows."""
        return self.first.rate(self.load.batch * self.load.prompt)

    @property
    def decode_rate(self) -> Spread | None:
        """New tokens per second, all rows."""
        return None if self.step is None else self.step.rate(self.load.batch)

    @property
    def text_rate(self) -> Spread:
        """Rows per second: of an encoder, texts."""
        return self.first.rate(self.load.batch)

    @property
    def prefill_share(self) -> float | None:
        """Of the roofline."""
        return None if self.prefill_bound is None else self.prefill_bound / self.first.median

    @property
    def decode_share(self) -> float | None:
        """Of the roofline."""
        return None if self.step_bound is None or self.step is None else self.step_bound / self.step.median


@dataclass
class Found:
    """Everything that a contest brought.

    Attributes:
        load_seconds: by contender, from its process being there to the weights being loaded.
        machine: by contender, what this machine reached on a set as large as its weights.
        missing: who did not run, and why.
    """

    rows: list[Row] = field(default_factory=list)
    load_seconds: dict[str, float] = field(default_factory=dict)
    machine: dict[str, Calibration] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def contest(subject: Subject, who: Sequence[Contender], loads: Sequence[Load], rounds: int, said: Said) -> Found:
    """Run it.

    Args:
        said: told what happens now.

    Raises:
        ScantlingInputError: they do not fit into memory together.
    """
    _check_room(subject, who, loads)
    found = Found()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scantling-bench-")))
        ready: dict[Contender, tuple[Child, int | None]] = {}
        for one in who:
            said(f"loading {one.name}")
            child = stack.enter_context(Child())
            try:
                told = _open(child, subject, one, scratch, said)
            except ScantlingError as error:
                found.missing.append(f"{one.name} does not run: {error}")
                continue
            ready[one] = (child, told["read_bytes"])
            found.load_seconds[one.name] = told["seconds"]
        for one, (_, read) in ready.items():
            said(f"measuring this machine for {one.name}")
            found.machine[one.name] = _machine(subject, one, read)
        for number, load in enumerate(loads, 1):
            at = f"load {number} of {len(loads)}: {load.name}"
            able = {one: pair for one, pair in ready.items() if load.cache in one.caches}
            found.rows += _rows(subject, able, load, rounds, found, partial(_say, said, at, rounds))
    return found


def _say(said: Said, at: str, rounds: int, number: int, name: str) -> None:
    said(f"{at}; {f'round {number} of {rounds}' if number else 'warming up'}, {name}")


def _check_room(subject: Subject, who: Sequence[Contender], loads: Sequence[Load]) -> None:
    import torch

    from scantling.numbers.memory import weight_bytes
    from scantling.tensor.memory import free_bytes

    def needed(one: Contender) -> float:
        caches = [account.allocated(subject.parts, one, load) or 0 for load in loads if load.cache in one.caches]
        weights = weight_bytes(subject.parts, "float32" if one.dtype == "stored" else one.dtype)
        return weights + max(caches, default=0) + ROOM

    total, free = round(sum(map(needed, who))), free_bytes(torch.device("cpu"))
    if free is not None and total > free:
        raise ScantlingInputError(
            f"{len(who)} contenders need about {bytes_text(total)} together and {bytes_text(free)} are free: "
            "name fewer with --engine, --dtype or --against"
        )


def _open(child: Child, subject: Subject, one: Contender, scratch: Path, said: Said) -> dict[str, Any]:
    """Load the model in its process; what a peer needs on disk is written first, by a process that ends."""
    asked: dict[str, Any] = {
        "engine": one.engine,
        "dtype": one.dtype,
        "model": subject.model,
        "initial": subject.initial,
        "revision": subject.revision,
        "width": subject.width,
        "family": subject.family,
        "vocab_size": subject.vocab_size,
    }
    if not one.is_peer:
        return child.ask("open", **asked)
    library = LIBRARY.get(one.engine)
    if library is not None and find_spec(library) is None:
        raise ScantlingError(f"{library} is not installed; get it with: pip install 'scantling[peers]'")
    if one.engine != "transformers" and subject.family != "decoder":
        raise ScantlingError(f"it is raced on decoders, and this is an {subject.family}")
    if one.dtype == "stored":
        assert subject.stored is not None
        return child.ask("open", **asked, file=str(subject.stored))
    name = "folder" if one.engine == "transformers" else "model.gguf"
    file = scratch / one.name.replace(" ", "-") / name
    file.parent.mkdir()
    said(f"writing the weights for {one.name}")
    kind = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(one.dtype, one.dtype)
    with Child() as writer:
        writer.ask("write", **asked, file=str(file), kind=kind)
    return child.ask("open", **asked, file=str(file))


def _machine(subject: Subject, one: Contender, read_bytes: int | None) -> Calibration:
    from scantling.numbers.reading import weights_read
    from scantling.study.calibrate import calibrate

    arithmetic = account.arithmetic_of(one)
    nbytes = weights_read(subject.parts, one.dtype, 1) if read_bytes is None else read_bytes
    return calibrate([], nbytes, CALIBRATION_SECONDS, besides=[arithmetic])


def _rows(
    subject: Subject,
    able: dict[Contender, tuple[Child, int | None]],
    load: Load,
    rounds: int,
    found: Found,
    said: Callable[[int, str], object],
) -> list[Row]:
    """One load; who fails at it is left out from there on, and why is kept."""
    asked = {"batch": load.batch, "prompt": load.prompt, "tokens": load.tokens, "cache": load.cache}
    failed: set[Contender] = set()

    def ask(one: Contender, do: str, **more: Any) -> dict[str, Any]:
        if one in failed:
            return {}
        try:
            return able[one][0].ask(do, **more)
        except ScantlingError as error:
            failed.add(one)
            found.missing.append(f"{one.name} does not run at {load.name}: {error}")
            return {}

    for one in able:
        ask(one, "mark")
    figures = interleaved({one.name: partial(ask, one, "run", load=asked) for one in able}, rounds, said)
    most = {one: ask(one, "memory") for one in able}
    return [
        _row(subject, one, load, able[one][1], figures[one.name], found.machine[one.name], most[one]["most"])
        for one in able
        if one not in failed
    ]


def _row(
    subject: Subject,
    one: Contender,
    load: Load,
    read_bytes: int | None,
    made: Sequence[dict[str, Any]],
    machine: Calibration,
    resident: int | None,
) -> Row:
    arithmetic, parts = account.arithmetic_of(one), subject.parts
    first, step = account.prefill(parts, one, load, read_bytes), account.step(parts, one, load, read_bytes)
    seconds = [run["decode_seconds"] * load.batch / run["made"] for run in made if run["made"]]
    row = Row(
        one,
        load,
        Spread.of([run["first_seconds"] for run in made]),
        Spread.of(seconds) if seconds else None,
        first,
        step,
        first.seconds(machine, arithmetic),
        None if step is None else step.seconds(machine, arithmetic),
        made[0]["cache_bytes"] or None,
        account.allocated(parts, one, load),
        resident,
    )
    return row if seconds else replace(row, decode=None, step_bound=None)
