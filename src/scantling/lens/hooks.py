"""The one mechanism: functions that see, and may replace, what passes the capture points of the built net."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from scantling.errors import ScantlingInputError
from scantling.lens.points import chosen
from scantling.passes import Given, prepare
from scantling.tensor.context import Context

if TYPE_CHECKING:
    from scantling.model import Model

Look: TypeAlias = Callable[[Tensor], Tensor]
ALL_REAL = Given()


@dataclass(frozen=True)
class Edit:
    """A change of what passes a point.

    Attributes:
        point: a capture point.
        change: what goes on in place of the value; it gets a copy that it may write into.
    """

    point: str
    change: Look


@dataclass(frozen=True)
class Captured:
    """What was seen in one pass.

    Attributes:
        values: by capture point; an edited point as its edit left it.
        out: what the model gave: logits (B, T, V) in float32, or what its head makes.
    """

    values: Mapping[str, Tensor]
    out: Tensor

    def __getitem__(self, point: str) -> Tensor:
        return self.values[point]


def capture(
    lm: Model,
    ids: Any,
    points: Iterable[str],
    given: Given = ALL_REAL,
    edits: Iterable[Edit] = (),
    kernel: str = "fused",
) -> Captured:
    """Run one pass and keep what passes the points.

    Args:
        ids: (B, T); of an encoder-decoder the source, with the target in `given`.
        points: names, or patterns such as ``decoder.blocks.*.attn:weights``.
        given: attention mask, positions, target and what else `Model.logits` takes.
        edits: are applied; an edited point is captured as it was changed.

    Raises:
        ScantlingInputError: no such point, one that this pass did not come by, or input that does not fit the model.
    """
    wanted, values = chosen(lm.parts, points), dict[str, Tensor]()

    def keep(point: str) -> Look:
        def look(value: Tensor) -> Tensor:
            values[point] = value.detach()
            return value

        return look

    with torch.no_grad(), _attached(lm, edits), _looking(lm, {point: keep(point) for point in wanted}):
        out = lm.net(*prepare(lm, ids, given, kernel)).float()
    if missing := [point for point in wanted if point not in values]:
        raise ScantlingInputError(f"this pass did not come by {missing[0]!r}: the part is not called, or another is")
    return Captured(values, out)


@contextmanager
def edited(lm: Model, *edits: Edit) -> Iterator[Model]:
    """Within the context every pass of the model is edited, also those of `generate` and `loss`.

    Drafted tokens are checked by the edited model; what caches held before is as it was.

    Raises:
        ScantlingInputError: no such point, or a model that decodes through compiled code.
    """
    if lm.packed is not None or lm.compiled is not None:
        raise ScantlingInputError(
            "the model decodes through compiled code, which has no capture points: set its `packed` and `compiled` to "
            "None first"
        )
    with _attached(lm, edits):
        yield lm


@contextmanager
def _attached(lm: Model, edits: Iterable[Edit]) -> Iterator[None]:
    changes: dict[str, Look] = {}
    for edit in edits:
        (point,) = chosen(lm.parts, [edit.point])
        changes[point] = _after(changes.get(point), edit.change)
    with _looking(lm, changes, changing=True) if changes else ExitStack():
        yield


def _after(first: Look | None, change: Look) -> Look:
    if first is None:
        return lambda value: change(value.clone())
    return lambda value: change(first(value))


@contextmanager
def _looking(lm: Model, looks: Mapping[str, Look], changing: bool = False) -> Iterator[None]:
    """Hooks on the net for the time of the context; every look gets the value at its point and gives what goes on."""
    marks = {point: look for point, look in looks.items() if ":" in point and not point.endswith(":in")}
    maps = {point.rpartition(":")[0] for point in marks if point.endswith((":scores", ":weights"))}
    with ExitStack() as hooks:
        net = hooks.enter_context(_plain(lm))
        modules = dict(net.named_modules())
        for point, look in looks.items():
            if point not in marks:
                hooks.enter_context(_hook(modules[point.removesuffix(":in")], point, look))
        if marks:
            hooks.enter_context(_observer(net, marks, maps, maps if changing else ()))
        yield


def _hook(module: nn.Module, point: str, look: Look) -> Any:
    def before(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_seen(point, look, given[0]), *given[1:])

    def after(_: nn.Module, __: Any, out: Any) -> Tensor:
        return _seen(point, look, out)

    # A handle of torch is a context that removes its hook.
    return module.register_forward_pre_hook(before) if point.endswith(":in") else module.register_forward_hook(after)


def _seen(point: str, look: Look, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ScantlingInputError(f"{point!r} is no single tensor and cannot be captured")
    return _fitting(point, value, look(value))


def _fitting(point: str, value: Tensor, put: Tensor) -> Tensor:
    if put.shape != value.shape:
        raise ScantlingInputError(f"the edit at {point!r} gives shape {list(put.shape)} for {list(value.shape)}")
    return put.to(value.dtype)


def _observer(net: nn.Module, marks: Mapping[str, Look], shown: Collection[str], changed: Collection[str]) -> Any:
    def recorder(path: str, value: Tensor) -> Tensor:
        look = marks.get(path)
        return value if look is None else _fitting(path, value, look(value))

    def before(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids, *rest = given
        ctx = rest[0] if rest else named.pop("ctx", None)
        ctx = Context.of(ids, training=module.training) if ctx is None else ctx
        ctx.observe(recorder, shown, changed)
        return (ids, ctx, *rest[1:]), named

    return net.register_forward_pre_hook(before, with_kwargs=True)


@contextmanager
def _plain(lm: Model) -> Iterator[nn.Module]:
    """The net as it was built, without torch.compile: a compiled one would go on without the hooks, and say nothing.

    Raises:
        ScantlingInputError: a part inside was compiled on its own, so that paths lead elsewhere.
    """
    given: Any = lm.net
    net: nn.Module = getattr(given, "_orig_mod", given)
    if inner := [name for name, _ in net.named_modules() if name.rpartition(".")[2] == "_orig_mod"]:
        raise ScantlingInputError(
            f"{inner[0].rpartition('.')[0]!r} was compiled on its own, so paths do not lead through it: "
            "compile the whole net, or look into the one it was made of"
        )
    in_place: dict[Any, Any] = {m: m._compiled_call_impl for m in net.modules() if m._compiled_call_impl is not None}
    lm.net = net
    for module in in_place:
        module._compiled_call_impl = None
    try:
        yield net
    finally:
        lm.net = given
        for module, compiled in in_place.items():
            module._compiled_call_impl = compiled
