"""Attention maps: do those that a pass gives when it is asked show whom its tokens read?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from scantling.audits import draw
from scantling.audits.ask import REFUSALS, could_not, crashed, listed
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted_subject import planted
from scantling.audits.protocol import Feed, Maps, Subject
from scantling.audits.registry import Plant, Probe

NAME = "maps"
PADS = 3
ROOM = 32
"""Last places by which a row of rounded weights may miss 1."""


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """A map per layer, rows that add up to 1, nothing on later tokens, padding, and past windows."""
    if not subject.can.maps:
        return [could_not(NAME, "it gives no attention maps")]
    return [_judged(subject, effort, where, way) for where, way in subject.can.maps.items()]


def _judged(subject: Subject, effort: Effort, where: str, way: Maps) -> Finding:
    most = draw.length(subject, effort)
    try:
        maps, feed, mask = _asked(subject, way, most, effort.seed)
    except REFUSALS as error:
        return could_not(NAME, f"it refuses: {str(error).strip()[:200]}", where)
    except Exception as error:
        return crashed(NAME, error, where)
    if not maps:
        return could_not(NAME, "asked for maps it gives none, and no error", where)
    wrong = _wrong(subject, maps, mask)
    if wrong is None:
        less = ", less the share of a sink" if subject.facts.sinks else ""
        text = f"a map per layer, rows that add up to 1{less}, nothing on what is hidden"
        return Finding(NAME, Verdict.CLEAN, text, 0.0, where, "of a row")
    for tokens in range(2, most):
        shorter = _asked(subject, way, tokens, effort.seed)
        if _wrong(subject, shorter[0], shorter[2]) is not None:
            _, feed, mask = shorter
            break
    shown = {"ids": listed(feed.ids), "attention_mask": listed(mask)}
    return Finding(NAME, Verdict.DEFECT, wrong[1], wrong[0], where, "of a row", shown)


@torch.no_grad()
def _asked(subject: Subject, way: Maps, tokens: int, seed: int) -> tuple[list[Tensor], Feed, Tensor]:
    """The maps of two rows, what was read, and which of it is real: the second begins with padding."""
    ids = draw.ids(subject.facts, 2, tokens, seed)
    mask = torch.ones_like(ids)
    if "mask" in subject.can.takes and tokens > PADS + 1:
        padded, real = draw.pad(subject.facts, ids[1:, PADS:], PADS, 0)
        ids, mask = torch.cat([ids[:1], padded]), torch.cat([mask[:1], real])
    feed = draw.feed(subject, ids, mask=None if bool(mask.all()) else mask)
    return [found.detach().double().cpu() for found in way(feed)], feed, mask


def _wrong(subject: Subject, maps: Sequence[Tensor], mask: Tensor) -> tuple[float, str] | None:
    """How much of a row is wrong, and what that means; None where nothing is."""
    facts, rows, tokens = subject.facts, *mask.shape
    layers = len(subject.can.blocks)
    if layers and len(maps) != layers:
        return float(abs(layers - len(maps))), f"{len(maps)} maps come of {layers} layers"
    for i, found in enumerate(maps):
        if found.dim() != 4 or found.shape[0] != rows or found.shape[2:] != (tokens, tokens):
            shape = "x".join(map(str, found.shape))
            return 1.0, f"the map of layer {i} is {shape}; {rows} rows, heads, {tokens} queries and keys are needed"
    real = mask.bool()
    seen = real[:, None, None, :].expand(-1, 1, tokens, -1)
    if facts.family != "encoder":
        seen = seen & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    asked = real[:, None, :, None].expand_as(seen)
    apart = (torch.arange(tokens)[:, None] - torch.arange(tokens)).abs()
    room = ROOM * torch.finfo(getattr(torch, facts.dtype)).eps / 2
    for i, found in enumerate(maps):
        width = facts.windows[i] if facts.windows and i < len(facts.windows) else None
        read = seen if width is None else seen & (apart < width)
        hidden = float(found.masked_fill(read | ~asked, 0.0).abs().amax())
        if hidden != 0:
            return hidden, f"the map of layer {i} shows that tokens read what is hidden from them"
        if float(found.masked_fill(~asked, 0.0).amin()) < 0:
            return 1.0, f"the map of layer {i} has weights below 0: these are scores"
        sums = torch.where(asked[..., 0], found.sum(-1), 1.0)
        off = sums - 1 if facts.sinks else (sums - 1).abs()
        if not float(off.amax()) <= room:
            return float(off.abs().amax()), f"rows of the map of layer {i} do not add up to 1"
    return None


def mapping(how: Callable[[Tensor], Tensor], sinks: bool = False) -> Subject:
    """A subject that makes something of its maps before it gives them."""
    subject = giving(lambda maps: [how(found) for found in maps])
    return replace(subject, facts=replace(subject.facts, sinks=sinks))


def giving(how: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> Subject:
    """A subject that makes something of its list of maps."""
    subject = planted()
    ((name, way),) = subject.can.maps.items()
    return replace(subject, can=replace(subject.can, maps={name: lambda feed: how(way(feed))}))


def _dropped(found: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return F.dropout(found, 0.1)


def _smeared(found: Tensor) -> Tensor:
    return 0.999 * found + 0.001 / found.shape[-1]


def _refusing(_: Sequence[Tensor]) -> Sequence[Tensor]:
    raise NotImplementedError("this kernel has no maps")


PROBE = Probe(
    NAME,
    "whether attention maps that are asked for are of every layer, add up to 1, and show nothing that is hidden",
    probe,
    (
        Plant("maps after dropout", lambda: mapping(_dropped)),
        Plant("scores in place of weights", lambda: mapping(lambda found: found.clamp(min=1e-6).log())),
        Plant("a thousandth on hidden keys", lambda: mapping(_smeared)),
        Plant("later tokens are read in the last block", lambda: planted("no mask in the last block")),
        Plant("a window of one key more", lambda: planted("window plus one", window=5)),
        Plant("an encoder reads padding", lambda: planted("padding read", family="encoder")),
        Plant("the last layer's is missing", lambda: giving(lambda maps: maps[:-1])),
        Plant("the mean over heads", lambda: mapping(lambda found: found.mean(1))),
        Plant("rows of a sink, and none is said", lambda: mapping(lambda found: 0.9 * found)),
        Plant("sound", planted, False, Verdict.CLEAN),
        Plant("sound, an encoder", lambda: planted(family="encoder"), False, Verdict.CLEAN),
        Plant("sound, windows", lambda: planted(window=5), False, Verdict.CLEAN),
        Plant("sound, an encoder's windows", lambda: planted(family="encoder", window=5), False, Verdict.CLEAN),
        Plant("sound, with a source", lambda: planted(family="encoder-decoder"), False, Verdict.CLEAN),
        Plant("sound, in bfloat16", lambda: planted(dtype="bfloat16"), False, Verdict.CLEAN),
        Plant("a sink", lambda: mapping(lambda found: 0.9 * found, sinks=True), False, Verdict.CLEAN),
        Plant("none on this kernel", lambda: giving(lambda maps: []), False, Verdict.COULD_NOT_RUN),
        Plant("refused", lambda: giving(_refusing), False, Verdict.COULD_NOT_RUN),
    ),
)
