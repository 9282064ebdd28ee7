"""`scantling bench`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from scantling.assembly import assemble
from scantling.checkpoint.find import card_of, default_model, find
from scantling.cli import bench_view, show
from scantling.errors import ScantlingInputError, nearest, need
from scantling.units import weights_dtype

if TYPE_CHECKING:
    from scantling.benches.contest import Subject
    from scantling.benches.plan import Contender, Load

MOST = 2**20


@click.command()
@click.argument("model", required=False)
@click.option(
    "--engine", "engines", metavar="E,...", help="torch, packed, packed-int8, compile. [default: the first 3]"
)
@click.option(
    "--dtype", "dtypes", metavar="D,...", help="Of torch's and compile's weights. [default: float32,bfloat16]"
)
@click.option("--width", default="stored", show_default=True, help="Of packed matrices: stored, f32, bf16, q8_0, ...")
@click.option("--cache", "caches", default="full", metavar="C,...", help="full, ring, int8, paged, ... [default: full]")
@click.option("--batch", "batches", default="1", metavar="B,...", help="Rows. [default: 1]")
@click.option("--prompt", "lengths", default="128,512", metavar="T,...", help="Tokens of a prompt. [default: 128,512]")
@click.option("--tokens", type=click.IntRange(1, MOST), default=32, show_default=True, help="After the first new one.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=3, show_default=True, help="After one to warm up.")
@click.option("--against", default="", metavar="P,...", help="transformers, llama.cpp, llama-server, openvino.")
@click.option("--png", type=click.Path(path_type=Path), metavar="FILE", help="Draw the rates.")
@click.option("--drift", is_flag=True, help="No times: how far every way of running is from float32, by layer.")
@click.option("--text", type=click.Path(path_type=Path), metavar="FILE", help="Of --drift; default: random ids.")
@show.revision_option
@show.json_option
def command(model: str | None, **given: Any) -> None:
    """Measure prefill and decode of MODEL apart, beside what its parts predict and what this machine reaches.

    Every contender has a process of its own and runs once per round; a table shows medians and spreads. A card without
    weights gets initial ones. Of an encoder, texts per second are measured. Without MODEL: SmolLM2-135M-Instruct.
    """
    png = given["png"]
    if png is not None and (png.suffix != ".png" or not png.parent.is_dir()):
        raise ScantlingInputError(f"--png is {str(png)!r}; a .png file in a folder that exists is needed")
    need("torch", "measure models")
    if given["drift"]:
        _drift(model, given)
        return
    if given["text"] is not None:
        raise ScantlingInputError("--text is for --drift; times do not depend on the words")
    if png is not None:
        need("matplotlib", "draw pictures")
    from scantling.benches.contest import contest

    subject = _subject(model, given["revision"], given["width"])
    who, missing = contenders(subject, given)
    with bench_view.Progress() as progress:
        found = contest(subject, who, loads(subject, given), given["rounds"], progress.say)
    found.missing[:0] = missing
    for line in found.missing:
        click.echo(f"note: {line}", err=True)
    if not found.rows:
        raise ScantlingInputError("nothing was measured: " + "; ".join(found.missing))
    if png is not None:
        bench_view.draw(found, png)
        click.echo(f"drawn to {png}", err=True)
    if given["as_json"]:
        show.emit(bench_view.data(subject, found, given["rounds"]))
    else:
        bench_view.tables(subject, found, given["rounds"])


def _drift(model: str | None, given: dict[str, Any]) -> None:
    """`--drift`."""
    from scantling.benches.drift import drifts, places, sample_ids
    from scantling.cards.rules import position_limit, positions_text
    from scantling.loading import from_card, load

    _refuse_timed()
    name = str(default_model()) if model is None else model
    initial = find(name, revision=given["revision"]).kind in ("preset", "card")
    lm = from_card(name) if initial else load(name, dtype="float32", revision=given["revision"])
    lm.net.requires_grad_(False).eval()
    lengths = sorted(_numbers(given["lengths"], "--prompt"))
    limit = position_limit(lm.card) if lm.parts.two_stacks else lm.card.context
    if limit is not None and lengths[-1] > limit:
        has = positions_text(lm.card) if lm.parts.two_stacks else f"a context of {limit:,}"
        raise ScantlingInputError(f"{lengths[-1]:,} tokens are asked for and {lm.card.name} has {has}")
    text = None if given["text"] is None else _text(given["text"])
    with bench_view.Progress() as progress:
        found, missing = drifts(lm, sample_ids(lm, lengths[-1], text), lengths, progress.say)
    for line in missing:
        click.echo(f"note: {line}", err=True)
    if given["as_json"]:
        rows = [asdict(row) for row in found]
        told = {"model": name, "initial_weights": initial, "places": places(lm), "rows": rows, "missing": missing}
        show.emit(told)
    else:
        bench_view.drift(name, initial, found, places(lm))


def _refuse_timed() -> None:
    """Raise where an option that is for times was given."""
    context = click.get_current_context()
    kept = ("model", "lengths", "drift", "text", "revision", "as_json")
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name not in kept and source is ParameterSource.COMMANDLINE:
            raise ScantlingInputError(f"--drift measures no times: leave {option.opts[0]} out")


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScantlingInputError(f"{path}: cannot be read: {error}") from None


def _subject(model: str | None, revision: str | None, width: str) -> Subject:
    from scantling.benches.contest import Subject
    from scantling.native.weights import WIDTHS

    if width not in WIDTHS:
        raise ScantlingInputError(f"--width is {width!r}; use one of {', '.join(WIDTHS)}{nearest(width, WIDTHS)}")
    name = str(default_model()) if model is None else model
    found, card = find(name, revision=revision), card_of(name, revision=revision)
    return Subject(
        name,
        assemble(card),
        card.family,
        card.vocab_size,
        initial=found.kind in ("preset", "card"),
        stored=found.path.resolve() if found.kind == "gguf" else None,
        revision=revision,
        width=width,
    )


def contenders(subject: Subject, given: dict[str, Any]) -> tuple[list[Contender], list[str]]:
    """Who runs; and of the engines that nobody asked for, why one does not.

    Raises:
        ScantlingInputError: no such engine, dtype or peer, or an engine that was asked for and cannot run.
    """
    from scantling.benches.plan import ENGINES, PEERS, UNASKED, Contender
    from scantling.native.program import outline

    asked = given["engines"]
    engines = _known(asked, "--engine", ENGINES) if asked else list(UNASKED)
    dtypes = [weights_dtype(name) for name in _list(given["dtypes"] or "float32,bfloat16", "--dtype")]
    why, missing = outline(subject.parts), list[str]()
    if isinstance(why, str) and (packed := [name for name in engines if name.startswith("packed")]):
        text = f"{' and '.join(packed)}: the compiled pass does not know this model: {why}"
        if asked:
            raise ScantlingInputError(text)
        missing.append(text)
        engines = ["torch"]
    elif "packed-int8" in engines and not _rounds(subject):
        text = "packed-int8: no matrix is in blocks of 8 or 4 bits, so nothing would be rounded; see --width"
        if asked:
            raise ScantlingInputError(text)
        missing.append(text)
        engines.remove("packed-int8")
    who = [
        Contender(name, dtype)
        for name in engines
        for dtype in ([subject.width] if name.startswith("packed") else dtypes)
    ]
    for peer in _known(given["against"], "--against", PEERS) if given["against"] else []:
        if peer == "transformers":
            who += [Contender(peer, dtype) for dtype in dtypes]
        elif subject.stored is not None and subject.width == "stored":
            who.append(Contender(peer, "stored"))
        else:
            who.append(Contender(peer, dtypes[0] if subject.width == "stored" else subject.width))
    return who, missing


def _rounds(subject: Subject) -> bool:
    """Whether the compiled pass meets blocks of 8 or 4 bits."""
    from scantling.checkpoint.gguf import read_gguf
    from scantling.native.tiles import block_bytes

    if subject.width != "stored" or subject.stored is None:
        return subject.width.startswith("q")
    return any(block_bytes(tensor.kind) is not None for tensor in read_gguf(subject.stored).tensors.values())


def loads(subject: Subject, given: dict[str, Any]) -> list[Load]:
    """What each is given to do.

    Raises:
        ScantlingInputError: no such cache, a number out of range, or more positions than the model has.
    """
    from scantling.benches.plan import CACHES, Load
    from scantling.cards.rules import position_limit, positions_text

    encoder = subject.family == "encoder"
    caches = ["full"] if encoder else _known(given["caches"], "--cache", CACHES)
    batches, lengths = _numbers(given["batches"], "--batch"), _numbers(given["lengths"], "--prompt")
    tokens = 0 if encoder else given["tokens"]
    card = card_of(subject.model, revision=subject.revision)
    longest = max(*lengths, tokens + 1) if subject.parts.two_stacks else max(lengths) + tokens + (0 if encoder else 1)
    limit = card.context if subject.family == "decoder" else position_limit(card)
    if limit is not None and longest > limit:
        has = f"a context of {limit:,}" if subject.family == "decoder" else positions_text(card)
        raise ScantlingInputError(f"{longest:,} positions are asked for and {card.name} has {has}")
    return [Load(batch, length, tokens, cache) for batch in batches for length in lengths for cache in caches]


def _list(text: str, option: str) -> list[str]:
    found = list(dict.fromkeys(filter(None, (word.strip() for word in text.split(",")))))
    if not found:
        raise ScantlingInputError(f"{option} is empty; at least one is needed")
    return found


def _known(text: str, option: str, known: tuple[str, ...]) -> list[str]:
    found = _list(text, option)
    if unknown := [name for name in found if name not in known]:
        raise ScantlingInputError(
            f"{option} names {unknown[0]!r}; use some of {', '.join(known)}{nearest(unknown[0], known)}"
        )
    return found


def _numbers(text: str, option: str) -> list[int]:
    words = _list(text, option)
    try:
        found = [int(word) for word in words]
    except ValueError:
        found = [0]
    if not all(1 <= number <= MOST for number in found):
        raise ScantlingInputError(f"{option} is {text!r}; whole numbers from 1 on are needed, as in 1,8")
    return found
