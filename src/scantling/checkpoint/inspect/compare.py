"""The tensors of a checkpoint beside the model of its config: what both say, and where they contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from scantling.cards import Card
from scantling.cards.schema import MultiHead
from scantling.checkpoint.files import shown
from scantling.checkpoint.inspect.codes import Finding
from scantling.checkpoint.inspect.correct import corrected, padding
from scantling.checkpoint.inspect.declared import Declared
from scantling.checkpoint.inspect.facts import Facts, Value, facts_of
from scantling.checkpoint.inspect.gather import Gathered
from scantling.checkpoint.inspect.grouped import grouped
from scantling.checkpoint.inspect.naming import Named, named
from scantling.checkpoint.inspect.ties import copies_of_the_table, head_that_is_the_table
from scantling.checkpoint.matching import Matched, bare
from scantling.checkpoint.names import Shape

_CODES = {
    "layers": "layer_count",
    "d_model": "width",
    "rows": "vocab_rows",
    "table_width": "width",
    "attention": "attention_kind",
    "heads": "heads",
    "kv_heads": "kv_heads",
    "d_head": "head_size",
    "q_width": "head_size",
    "kv_width": "kv_heads",
    "bias": "biases",
    "qk_norm": "norms",
    "sinks": "attention_kind",
    "mlp": "mlp_kind",
    "d_ff": "mlp_width",
    "d_expert": "mlp_width",
    "d_shared": "mlp_width",
    "mlp_bias": "biases",
    "experts": "experts",
    "dense_layers": "experts",
    "router_bias": "biases",
    "selection_bias": "experts",
    "norm_at": "norms",
    "norm_bias": "norms",
    "final_norm": "norms",
    "embed_norm": "norms",
    "skip_first": "norms",
    "residual": "norms",
    "position": "positions",
    "position_rows": "positions",
    "types": "positions",
    "d_rotary": "rope_parameters",
    "head": "head_kind",
    "n_labels": "head_kind",
    "tied": "untied_absent",
    "head_bias": "biases",
    "transform": "head_kind",
}
_CODES |= dict.fromkeys(("d_nope", "d_rope", "d_value", "kv_rank", "q_rank"), "latent")
"""What it means when tensors and config differ in a fact; facts that follow from others are left out."""

_FOLLOW = {"d_head": ("heads", "kv_heads", "q_width", "kv_width"), "heads": ("q_width",), "kv_heads": ("kv_width",)}
"""Facts that need no word of their own where another one differs."""
_SIZES = frozenset({"width", "head_size", "kv_heads", "mlp_width", "latent"})
"""What a part of the tensors shows as well as all of them."""


@dataclass
class Comparison:
    """Both sides, and what to make of them.

    Attributes:
        named: all tensors of the file by their names.
        file: what they show.
        said: what the tensors of the config's model would show; None without such a model.
        card: of the config, with the sizes that the tensors show where they differ; None where there is no such card.
        changed: facts in which that card is not the config's.
        rebuilds: the card's model has exactly the tensors of the file.
        beside: names in the file of the tensors that this model reads, by their names in the family's table.
        weights: the same names alone, or where there is no model those that have a meaning.
        copies: names in the file of a tied matrix that is stored again.
    """

    named: Named
    file: Facts
    said: Facts | None = None
    card: Card | None = None
    changed: tuple[str, ...] = ()
    rebuilds: bool = False
    beside: dict[str, str] = field(default_factory=dict)
    weights: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    findings: list[Finding] = field(default_factory=list)


def compare(gathered: Gathered, declared: Declared | None) -> Comparison:
    """Put tensors and config side by side.

    Raises:
        ScantlingInputError: a file cannot be read any more.
    """
    shapes = {name: tensor.shape for name, tensor in gathered.tensors.items()}
    names = named(shapes, gguf=gathered.form == "gguf")
    found = Comparison(names, facts_of(names))
    if not shapes:
        found.card = declared.card if declared else None
        found.said = None if declared is None else _facts(declared.shapes, gathered)
        return found
    found.findings += _about_names(found, gathered)
    if declared is None:
        known = {name for group in names.groups if group.roles for name in group.names.values()}
        found.weights = tuple(name for name in shapes if name in known)
        found.findings += _unknown_names(names)
    else:
        _beside(found, gathered, declared, shapes)
    return found


def _facts(shapes: Mapping[str, Shape], gathered: Gathered) -> Facts:
    return facts_of(named(shapes, gguf=gathered.form == "gguf"))


def _about_names(found: Comparison, gathered: Gathered) -> Iterator[Finding]:
    names, shown_facts = found.named, found.file
    if names.wrappers:
        example = next(name for name in gathered.tensors if name.startswith(names.wrappers))
        left = "torch.compile" if "_orig_mod." in names.wrappers else "DistributedDataParallel"
        left = left if len(names.wrappers) == 1 else "torch.compile and DistributedDataParallel"
        prefixes = " and ".join(map(repr, names.wrappers))
        yield Finding("wrapper_prefix", f"names such as {shown(example)} carry {prefixes}, the prefix of {left}")
    for first, second in names.twice[:8]:
        yield Finding("tensor_twice", f"{shown(first)} and {shown(second)} are one tensor")
    layers: dict[str, set[int]] = {}
    for name, role in shown_facts.roles.items():
        side, _, rest = name[0].partition(".blocks.")
        if rest:
            layers.setdefault(side, set()).update(role.shapes)
    for side, numbers in layers.items():
        gaps = [i for i in range(max(numbers) + 1) if i not in numbers]
        if gaps and gathered.complete:
            listed = ", ".join(map(str, gaps[:8])) + (f" and {len(gaps) - 8} more" if len(gaps) > 8 else "")
            yield Finding("layer_gap", f"layers of the {side} go up to {max(numbers)}, and {listed} are not there")
    if found.file.beyond:
        numbers_beyond = ", ".join(str(i) for _, i in found.file.beyond)
        yield Finding("layers_beyond", f"layers {numbers_beyond} hold tensors that no other layer has")


def _unknown_names(names: Named) -> Iterator[Finding]:
    unknown = [name for g in names.groups if not g.roles and not g.ignored for name in g.names.values()]
    if unknown:
        total = sum(len(group.members) for group in names.groups)
        yield Finding("names_unknown", f"{len(unknown):,} of {total:,} tensors: {grouped(unknown)}")
    ignored = [name for group in names.groups if group.ignored for name in group.names.values()]
    if ignored:
        yield Finding("tensor_ignored", grouped(ignored))


def _beside(found: Comparison, gathered: Gathered, declared: Declared, shapes: Mapping[str, Shape]) -> None:
    beside = declared.beside(shapes)
    found.findings += [
        Finding("tensor_twice", f"{shown(a)} and {shown(b)} are one tensor")
        for a, b in beside.twice[:8]
        if (b, a) not in found.named.twice
    ]
    if _is_other_family(found.named, declared):
        theirs = ", ".join(found.named.likely)
        text = f"the tensors have names of {theirs}, and the config says {declared.name}"
        found.findings.append(Finding("family", text))
        return
    found.findings += _other_names(gathered, declared)
    found.copies = tuple(name for name in beside.extra if declared.plain(name) in declared.copies)
    parted, told = copies_of_the_table(found.copies, gathered, declared, beside)
    heads = [name for name in parted if declared.plain(name) in declared.heads]
    computed = [name for name in beside.extra if declared.plain(name) in declared.computed]
    if (beside.unread or computed) and gathered.form != "gguf":
        found.findings.append(Finding("tensor_ignored", grouped([*beside.unread, *computed])))
    aside = {*beside.unread, *computed, *found.copies} - {*heads}
    own = {name: shape for name, shape in shapes.items() if name not in aside} if aside else shapes
    found.beside, found.weights = beside.names, tuple(beside.names.values())
    found.card = declared.card
    found.said = found.file if declared.shapes == shapes else _facts(declared.shapes, gathered)
    if declared.quantised is not None:
        return
    found.findings += told
    _contradictions(found, gathered, declared, own, beside)
    found.rebuilds = found.rebuilds and len(heads) == len(parted)
    found.findings += head_that_is_the_table(gathered, declared, beside)


def _is_other_family(names: Named, declared: Declared) -> bool:
    total = sum(len(group.members) for group in names.groups)
    return bool(names.families) and declared.name not in names.families and 2 * names.known > total


def _other_names(gathered: Gathered, declared: Declared) -> Iterator[Finding]:
    if not declared.renamed:
        return
    old = [name for name in gathered.tensors if bare(name) != bare(name, declared.renamed)]
    if old:
        new = bare(old[0], declared.renamed)
        yield Finding("other_names", f"{len(old)} names such as {shown(old[0])}, which stands for {shown(new)}")


def _contradictions(
    found: Comparison, gathered: Gathered, declared: Declared, own: Mapping[str, Shape], beside: Matched
) -> None:
    """Facts that differ, then the tensors that still do not fit when those are set right."""
    assert found.said is not None
    file = found.file if len(own) == len(gathered.tensors) else _facts(own, gathered)
    differing = [key for key in _CODES if _differ(file.value(key), found.said.value(key))]
    if not gathered.complete:
        differing = [key for key in differing if _CODES[key] in _SIZES]
    if file.turned:
        found.findings.append(Finding("transposed", grouped(file.turned)))
    follows = {name for key, names in _FOLLOW.items() if key in differing for name in names}
    if file.value("tied") is False:
        # That the matrices are two has been said where they were compared.
        follows.add("tied")
    side = "the metadata" if gathered.form == "gguf" else "the config"
    told = [key for key in differing if key not in follows]
    found.findings += [_contradiction(key, file, found.said, declared.card, side) for key in told]
    card = corrected(declared.card, file, frozenset(differing)) if differing else declared.card
    if card is not None and differing:
        beside = declared.beside(own, card)
        found.beside, found.weights = beside.names, tuple(beside.names.values())
    leftover = list(_leftover(declared, card or declared.card, own, beside, file, gathered.complete))
    found.findings += leftover
    found.card, found.changed = card, tuple(differing)
    found.rebuilds = card is not None and not leftover and not file.turned and gathered.complete


def _differ(file: Value, said: Value) -> bool:
    return file is not None and said is not None and file != said


def _leftover(
    declared: Declared,
    card: Card,
    own: Mapping[str, Shape],
    beside: Matched,
    file: Facts,
    complete: bool,
) -> Iterator[Finding]:
    extra = [name for name in beside.extra if name in own]
    if beside.missing and complete:
        yield Finding("tensor_missing", f"{len(beside.missing):,} tensors: {grouped(beside.missing)}")
    if extra:
        yield Finding("tensor_extra", f"{len(extra):,} tensors: {grouped(extra)}")
    if file.turned or not beside.misshapen:
        return
    wanted = declared.shapes_of(card)
    first = beside.misshapen[0]
    mine, right = list(own[beside.names[first]]), list(wanted[first])
    text = f"{grouped(beside.misshapen)}; {shown(beside.names[first])} is {mine} and the config asks for {right}"
    yield Finding("shape", text)


def _contradiction(key: str, file: Facts, said: Facts, card: Card, side: str) -> Finding:
    fact = file.facts[key]
    mine, its = _words(file.value(key)), _words(said.value(key))
    text = f"{fact.what}: {mine} by the tensors, {its} by {side}"
    code, cause, attention = _CODES[key], "", card.attention
    if key == "rows":
        return _table(file, card, text)
    if key == "tied":
        text = "the config has a head of its own, and the file has no matrix for it"
    if key == "q_width" and isinstance(attention, MultiHead) and isinstance(width := file.value(key), int):
        text += f" ({attention.n_heads} heads of {attention.d_head})"
        if width % attention.n_heads == 0:
            cause = (
                f"head_dim is not stated, or is wrong: {attention.n_heads} heads of {width // attention.n_heads} "
                "would fit"
            )
    if key == "kv_width" and isinstance(attention, MultiHead) and isinstance(width := file.value(key), int):
        text += f" ({attention.n_kv_heads} KV heads of {attention.d_head})"
    return Finding(code, text, cause)


def _table(file: Facts, card: Card, text: str) -> Finding:
    rows = file.value("rows")
    assert isinstance(rows, int)
    if (multiple := padding(card.vocab_size, rows)) is None:
        return Finding("vocab_rows", text)
    return Finding(
        "vocab_padded",
        f"{text}: {rows - card.vocab_size:,} rows more",
        f"the table was padded to a multiple of {multiple} and vocab_size was left as it was",
    )


def _words(value: Value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
