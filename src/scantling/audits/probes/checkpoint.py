"""Damaged checkpoints: is a folder that does not hold the model refused?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from scantling.audits import draw, files
from scantling.audits.ask import could_not
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.judge import worst
from scantling.audits.planted import Tiny
from scantling.audits.planted_subject import planted, subject_of
from scantling.audits.protocol import Change, Feed, Subject
from scantling.audits.registry import Plant, Probe

NAME = "checkpoint"
LENIENT = 2.0**-16


@dataclass(frozen=True)
class Damage:
    """What is done to a saved folder.

    Attributes:
        what: it is, in words.
        do: it, to the folder; None where the folder does not allow it.
        meaning: of other logits without an error.
    """

    what: str
    do: Callable[[Path], None]
    meaning: str


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """Folders in which a tensor is missing, renamed, doubled or left out of the index: each must be refused, or give
    the model that was saved."""
    if subject.can.reload is None:
        return [could_not(NAME, "it cannot be saved and loaded")]
    feed = draw.feed(subject, draw.ids(subject.facts, 1, draw.length(subject, effort), effort.seed))
    with torch.no_grad():
        before = subject.run(feed)
        return [_tried(subject, damage, feed, before) for damage in DAMAGES]


def _tried(subject: Subject, damage: Damage, feed: Feed, before: Tensor) -> Finding:
    assert subject.can.reload is not None
    try:
        again = subject.can.reload(damage.do)
    except _Impossible as why:
        return Finding(NAME, Verdict.NOT_APPLICABLE, str(why), where=damage.what)
    except Exception as error:
        text = "a damaged folder is refused"
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        return Finding(NAME, Verdict.CLEAN, text, 0.0, damage.what, data={"said": said})
    after = again.run(feed)
    if after.shape == before.shape:
        apart, spread = worst(before, after)
        if apart <= LENIENT * spread:
            return Finding(NAME, Verdict.CLEAN, "the model is loaded as it was saved", 0.0, damage.what)
    else:
        apart, spread = float("inf"), 1.0
    text = f"{damage.meaning}, without an error"
    return Finding(NAME, Verdict.DEFECT, text, apart / spread, damage.what, smallest={"change": damage.what})


class _Impossible(Exception):
    """The folder does not allow this damage."""


def _victim(state: Mapping[str, Tensor]) -> str:
    """The name of a matrix in the middle of the model, which is neither table nor head."""
    matrices = [name for name, t in state.items() if t.dim() == 2 and t.is_floating_point()]
    most = max((state[n].shape[0] for n in matrices), default=0)
    inner = [n for n in sorted(matrices) if state[n].shape[0] < most] or sorted(matrices)
    if not inner:
        raise _Impossible("it saves no matrix as safetensors")
    return inner[len(inner) // 2]


def _missing(folder: Path) -> None:
    state = files.tensors(folder)
    del state[_victim(state)]
    files.write(folder, state)


def _renamed(folder: Path) -> None:
    state = files.tensors(folder)
    _victim(state)
    files.write(folder, {f"_orig_mod.module.{name}": t for name, t in state.items()})


def _doubled(folder: Path) -> None:
    state = files.tensors(folder)
    name = _victim(state)
    first = {n: t for n, t in state.items() if n == name}
    second = {n: t for n, t in state.items() if n != name} | {name: torch.zeros_like(state[name])}
    files.write_sharded(folder, [first, second], {n: 0 if n == name else 1 for n in state})


def _unlisted(folder: Path) -> None:
    state = files.tensors(folder)
    name = _victim(state)
    names = sorted(state)
    half = len(names) // 2
    shards: list[Mapping[str, Tensor]] = [{n: state[n] for n in names[:half]}, {n: state[n] for n in names[half:]}]
    files.write_sharded(folder, shards, {n: int(n in names[half:]) for n in names if n != name})


DAMAGES = (
    Damage("a tensor is missing", _missing, "it is replaced by other numbers"),
    Damage("names begin with _orig_mod.module.", _renamed, "no name fits, and other numbers are taken"),
    Damage(
        "a tensor stands in two files",
        _doubled,
        "it takes the one that the index does not name",
    ),
    Damage("the index leaves a tensor out", _unlisted, "it is replaced by other numbers"),
)


def lenient(*kinds: str) -> Subject:
    """Loads what fits and keeps random numbers for the rest; of doubled tensors it takes the last file's."""
    subject = planted(name="a lenient loader")
    net = subject.can.module
    assert isinstance(net, Tiny)

    def again(change: Change) -> Subject:
        import tempfile

        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            files.write(folder, {key: value.clone() for key, value in net.state_dict().items()})
            change(folder)
            state = files.tensors(folder)
            sharded = (folder / files.INDEX).exists()
        new = Tiny(replace(net.shape, seed=5)).eval()
        if "renamed" in kinds:
            state = {key.removeprefix("_orig_mod.module."): value for key, value in state.items()}
        whole = state.keys() == new.state_dict().keys()
        if not whole and "missing" not in kinds:
            raise ValueError("a tensor is missing")
        if sharded and "doubled" not in kinds:
            raise ValueError("this loader reads single files")
        new.load_state_dict(state, strict=False)
        return subject_of(new, subject.name)

    return replace(subject, can=replace(subject.can, reload=again))


PROBE = Probe(
    NAME,
    "whether a folder that does not hold the model is refused",
    probe,
    (
        Plant("missing tensors are drawn anew", lambda: lenient("missing", "renamed")),
        Plant("names that do not fit are passed over", lambda: lenient("missing")),
        Plant("the last file wins", lambda: lenient("doubled", "renamed")),
        Plant("all that", lambda: lenient("missing", "doubled")),
        Plant("sound: whole or refused", planted, False, Verdict.CLEAN),
        Plant("prefixes are understood", lambda: lenient("renamed"), False, Verdict.CLEAN),
        Plant("nothing to load", lambda: replace(planted(), can=replace(planted().can, reload=None)), False),
    ),
)
