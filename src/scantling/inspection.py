"""A checkpoint from its headers: what it is, what its config says, and whether the two agree."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scantling.assembly import assemble
from scantling.cards import Card, is_preset
from scantling.cards.schema import Learned, MoE, MultiHead, Relative, RoPE
from scantling.checkpoint.files import is_address
from scantling.checkpoint.header import HEADER_LIMIT
from scantling.checkpoint.inspect.checks import checks, qk_layout
from scantling.checkpoint.inspect.codes import SEVERITIES, Finding
from scantling.checkpoint.inspect.compare import Comparison, compare
from scantling.checkpoint.inspect.declared import Declared, declared
from scantling.checkpoint.inspect.facts import Value
from scantling.checkpoint.inspect.gather import Gathered, gather
from scantling.checkpoint.inspect.kinds import Kind, kinds
from scantling.checkpoint.inspect.reproduce import card_text, order, partial, quantised, reproduction
from scantling.checkpoint.inspect.summary import Line, by_part, lines
from scantling.errors import ScantlingInputError
from scantling.study.facts import reach

if TYPE_CHECKING:
    from scantling.checkpoint.inspect.checksums import Progress

_SUFFIXES = (".safetensors", ".gguf", ".json", ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".yaml", ".yml")


@dataclass(frozen=True)
class Inspection:
    """Everything about one checkpoint.

    Attributes:
        card: that rebuilds its model; None where there is no such card.
        lines: what tensors show beside what the config says.
        by_part: numbers in the tensors that belong to the model, by part.
        kinds: the same tensors by dtype.
        families: model types whose names the tensors have, those first that have few others.
        layout: how rotated pairs lie in the rows of queries and keys, in words; None where nothing is turned.
        checksums: sha256 by file, where they were asked for.
    """

    gathered: Gathered
    declared: Declared | None
    card: Card | None
    changed: tuple[str, ...]
    comparison: Comparison
    lines: tuple[Line, ...]
    by_part: Mapping[str, int]
    kinds: tuple[Kind, ...]
    families: tuple[str, ...]
    layout: str | None
    findings: tuple[Finding, ...]
    checksums: Mapping[str, str]

    @property
    def total(self) -> int:
        """Numbers in all tensors of the model."""
        return sum(kind.numel for kind in self.kinds)

    @property
    def ok(self) -> bool:
        """No finding is an error."""
        return all(finding.severity != "error" for finding in self.findings)

    @property
    def quantisation(self) -> str:
        """Kinds of blocks, the method of the config, none, or unknown."""
        return quantised(self.gathered, self.declared, self.kinds)

    def card_yaml(self) -> str:
        """The reproduction card.

        Raises:
            ScantlingInputError: there is no card that rebuilds the model.
        """
        if self.card is None:
            raise ScantlingInputError(f"{self.gathered.where}: no card rebuilds these tensors: {self.why_no_card()}")
        return card_text(self.card, self.changed, self.comparison.file)

    def why_no_card(self) -> str:
        """What stands in the way of a card."""
        if self.declared is None:
            return "there is no config that could be read, and tensors alone do not tell everything"
        errors = [finding.message for finding in self.findings if finding.severity == "error"]
        return errors[0] if errors else "their shapes are not compared"

    def partial(self) -> dict[str, Any]:
        """The sections of a card as far as the tensors alone show them, with ``unknown`` for the rest."""
        kinds = [kind.dtype for kind in sorted(self.kinds, key=lambda kind: -kind.numel)]
        return partial(self.comparison.file, kinds[0] if kinds else "unknown")


def inspect(
    path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    hashes: bool = False,
    header_limit: int = HEADER_LIMIT,
    progress: Progress | None = None,
) -> Inspection:
    """Look into a checkpoint: headers, config, and a few rows where headers cannot tell.

    Args:
        path: a folder, a .safetensors or .gguf file, an index or a config.json.
        revision: of a hub id.
        hashes: also compute the sha256 of every file of weights, which reads all of it.
        header_limit: bytes of the longest safetensors header accepted.
        progress: called while files are hashed.

    Raises:
        ScantlingInputError: there is no such checkpoint, or a file is malformed.
    """
    name = os.fspath(path)
    if is_address(name) or _is_hub_id(name):
        if hashes:
            raise ScantlingInputError(f"{name}: --hash reads all of a file, and this one is on another machine")
        return _elsewhere(name, revision, header_limit)
    if revision is not None:
        raise ScantlingInputError(f"--revision goes with a hub id, and {name!r} is none")
    with _uncollected():
        gathered = _gathered(name, header_limit)
        if not hashes:
            return _inspected(gathered, {})
        from scantling.checkpoint.inspect.checksums import checksums

        return _inspected(gathered, checksums(gathered, progress))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without collections of garbage: of the many small objects of a header none is in a cycle."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _is_hub_id(name: str) -> bool:
    bare = name.count("/") == 1 and not name.startswith((".", "/")) and not name.endswith("/")
    return bare and not os.path.lexists(name) and Path(name).suffix not in _SUFFIXES


def _elsewhere(name: str, revision: str | None, limit: int) -> Inspection:
    from tempfile import TemporaryDirectory

    from scantling.checkpoint.inspect.elsewhere import as_folder, gather_address, hub_address, name_of
    from scantling.checkpoint.remote import Address

    address = as_folder(Address(name)) if is_address(name) else hub_address(name, revision)
    with TemporaryDirectory() as made:
        folder = Path(made) / name_of(address)
        folder.mkdir()

        def renamed(text: str) -> str:
            return text.replace(str(folder / "_")[:-1], str(address.with_name("")))

        try:
            found = _inspected(gather_address(address, folder, limit=limit), {})
        except ScantlingInputError as error:
            raise ScantlingInputError(renamed(str(error))) from None
        return replace(found, findings=tuple(replace(f, message=renamed(f.message)) for f in found.findings))


def _inspected(gathered: Gathered, checksums: Mapping[str, str]) -> Inspection:
    said, findings = declared(gathered, lambda card: assemble(card).named_stored)
    found = compare(gathered, said)
    stored = kinds(gathered.tensors, found.weights)
    layout, more = (None, []) if said is None else qk_layout(gathered, said, found)
    every = [*gathered.findings, *findings, *found.findings, *checks(gathered, said, found, stored), *more]
    every.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Inspection(
        gathered,
        said,
        reproduction(gathered, said, found, stored),
        found.changed,
        found,
        tuple(lines(found, said)),
        by_part(gathered, found),
        stored,
        found.named.families,
        layout,
        tuple(every),
        checksums,
    )


def _gathered(name: str, limit: int) -> Gathered:
    path = Path(name)
    if not name:
        raise ScantlingInputError("the path is empty")
    if not os.path.lexists(path):
        if is_preset(name):
            raise ScantlingInputError(f"{name} is a preset and has no checkpoint: `scantling card {name}` prints it")
        raise ScantlingInputError(f"{name}: no such file or folder")
    if path.suffix in (".yaml", ".yml"):
        raise ScantlingInputError(f"{name}: a card has no tensors; a folder, a .safetensors or a .gguf file is needed")
    return gather(path, limit=limit)


def checklist(found: Inspection) -> dict[str, Value | float]:
    """What a reader of a checkpoint looks at first: width, heads, layers, expansion, split, position, reach, order."""
    card = found.card or (found.declared.card if found.declared else None)
    facts = found.comparison.file
    split = {part: n / found.total for part, n in found.by_part.items()} if found.total else {}
    mlp = sum(share for part, share in split.items() if part in ("mlp", "experts", "router"))
    out: dict[str, Value | float] = {
        "width": facts.value("d_model"),
        "heads": facts.value("heads"),
        "layers": facts.value("layers"),
        "expansion": _ratio(facts.value("d_ff"), facts.value("d_model")),
        "attention share": split.get("attention"),
        "MLP share": mlp or None,
        "position": facts.value("position"),
        "attention": facts.value("attention"),
        "residual order": facts.value("norm_at"),
    }
    return out if card is None else out | _of_card(card)


def _ratio(one: Value, other: Value) -> float | None:
    return one / other if type(one) is type(other) is int and other else None


def _of_card(card: Card) -> dict[str, Value | float]:
    model, attention, position = assemble(card), card.attention, card.position
    heads = str(attention.n_heads)
    if isinstance(attention, MultiHead):
        heads += f" of {attention.d_head}, {attention.n_kv_heads} KV heads"
    inner = card.mlp.expert if isinstance(card.mlp, MoE) else card.mlp
    kind = str(position.__struct_config__.tag)
    more = ""
    if isinstance(position, RoPE):
        scaling = "" if position.scaling is None else f", {position.scaling.__struct_config__.tag} scaling"
        more = f", base {position.theta:,g}{scaling}"
    elif isinstance(position, Learned):
        more = f", {card.context:,} positions"
    elif isinstance(position, Relative):
        more = f", {position.buckets} buckets"
    layers = [len(stack.blocks) for stack in model.stacks.values()]
    parallel = ", parallel" if card.residual.parallel else ""
    return {
        "width": card.d_model,
        "heads": heads,
        "layers": layers[0] if len(layers) == 1 else " + ".join(map(str, layers)),
        "expansion": (inner.d_ff or 0) / card.d_model,
        "position": f"{kind}{more}",
        "attention": f"{attention.__struct_config__.tag}, {reach(model)}",
        "residual order": f"{order(card)}-norm{parallel}" if order(card) in ("pre", "post") else order(card) + parallel,
    }
