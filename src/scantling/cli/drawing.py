"""Options of the commands that write text: how tokens are drawn, and how keys and values are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from scantling.cli import engines, show
from scantling.errors import ScantlingInputError, need

if TYPE_CHECKING:
    from scantling.generate.beam import Beams
    from scantling.generate.constrain import Shape
    from scantling.generate.contrastive import Contrastive
    from scantling.generate.keeping import Keeping
    from scantling.generate.ledger import Ledger
    from scantling.generate.sampling import Sampling
    from scantling.generate.settings import Options
    from scantling.generate.speculative import Drafting
    from scantling.model import Model

F = TypeVar("F", bound=Callable[..., Any])


def grouped(name: str, options: dict[str, Any]) -> Callable[[F], F]:
    """Options that a command takes as one dictionary, `name`; by the name of each its option."""

    def add(command: F) -> F:
        @wraps(command)
        def collected(**named: Any) -> Any:
            group = {key: named.pop(key) for key in options}
            return command(**{name: group}, **named)

        for option in reversed(options.values()):
            collected = option(collected)
        return collected  # type: ignore[return-value]

    return add


DRAWN = {
    "temperature": click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
    "top_k": click.option("--top-k", type=int, default=0, help="Keep the k likeliest tokens; 0 keeps all."),
    "top_p": click.option("--top-p", type=float, default=1.0, help="Keep the likeliest tokens up to this mass."),
    "min_p": click.option("--min-p", type=float, default=0.0, help="Keep tokens this likely beside the likeliest."),
    "typical_p": click.option("--typical-p", type=float, default=1.0, help="Keep the most typical up to this mass."),
    "epsilon_cutoff": click.option("--epsilon-cutoff", type=float, default=0.0, help="Keep tokens this likely."),
    "eta_cutoff": click.option("--eta-cutoff", type=float, default=0.0, help="The same, less where many are likely."),
    "repetition_penalty": click.option(
        "--repetition-penalty", type=float, default=1.0, help="Above 1, against tokens of prompt and text."
    ),
    "presence_penalty": click.option(
        "--presence-penalty", type=float, default=0.0, help="Off the logits of tokens of the text."
    ),
    "frequency_penalty": click.option(
        "--frequency-penalty", type=float, default=0.0, help="The same, for each time that they came."
    ),
    "no_repeat_ngram": click.option(
        "--no-repeat-ngram", type=int, default=0, metavar="N", help="No N tokens in a row come twice."
    ),
    "logit_bias": click.option(
        "--logit-bias", multiple=True, metavar="ID=X", help="Added to the logit of a token; may be repeated."
    ),
    "seed": show.seed_option,
}


sampling_options = grouped("drawn", DRAWN)


def sampling(drawn: dict[str, Any]) -> Sampling:
    """The record of what `sampling_options` collected; what does nothing is said on standard error.

    Raises:
        ScantlingInputError: a setting out of range.
    """
    from scantling.generate.sampling import Sampling

    made = Sampling(**{**drawn, "logit_bias": tuple(_bias(pair) for pair in drawn["logit_bias"])})
    narrowing = ("top_k", "min_p", "epsilon_cutoff", "eta_cutoff")
    idle = [name for name in narrowing if drawn[name]]
    idle += [name for name in ("top_p", "typical_p") if drawn[name] < 1]
    idle += [] if drawn["seed"] is None else ["seed"]
    if made.greedy and idle:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in idle)
        make = "makes" if len(idle) == 1 else "make"
        click.echo(f"note: temperature is 0, the likeliest token: {names} {make} no difference", err=True)
    return made


def _bias(pair: str) -> tuple[int, float]:
    token, _, value = pair.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise ScantlingInputError(f"--logit-bias {pair!r}: a token id and a number are needed, as in 50=-100") from None


BEAMS = {
    "beams": click.option("--beams", type=int, metavar="N", help="Keep N beginnings; the best text is written."),
    "length_penalty": click.option(
        "--length-penalty", type=float, default=1.0, show_default=True, help="Of beams: above 0 favours long texts."
    ),
    "early_stopping": click.option(
        "--early-stopping", is_flag=True, help="Of beams: end with the first N whole texts."
    ),
}
beam_options = grouped("searched", BEAMS)
search_options = grouped(
    "searched",
    {
        **BEAMS,
        "best_of": click.option(
            "--best-of", type=int, default=1, metavar="N", help="Draw N texts; the likeliest per token is written."
        ),
    },
)
contrast_options = grouped(
    "contrasted",
    {
        "contrastive": click.option(
            "--contrastive", type=int, metavar="K", help="Of the K likeliest tokens the one least like the text so far."
        ),
        "penalty_alpha": click.option(
            "--penalty-alpha", type=float, help="Of --contrastive: the weight of being unlike. [default: 0.6]"
        ),
    },
)
shape_options = grouped(
    "shaped",
    {
        "regex": click.option("--regex", metavar="EXPR", help="The text must match it whole."),
        "schema": click.option(
            "--json-schema", "schema", type=click.Path(path_type=Path), metavar="FILE", help="The text must follow it."
        ),
    },
)
cache_options = grouped(
    "kept",
    {
        "kind": click.option(
            "--cache", "kind", default="full", show_default=True, help="full, or ring: window layers keep the window."
        ),
        "numbers": click.option(
            "--cache-numbers", "numbers", default="plain", show_default=True, help="plain or int8."
        ),
        "chunk": click.option("--prefill-chunk", "chunk", type=int, metavar="N", help="Tokens of a prompt at once."),
    },
)
draft_options = grouped(
    "drafted",
    {
        "draft_model": click.option("--draft-model", help="A smaller model that proposes tokens."),
        "draft_layers": click.option(
            "--draft-layers", type=int, metavar="N", help="The first N layers, of a decoder, propose tokens."
        ),
        "draft_lookup": click.option(
            "--draft-lookup", type=int, metavar="N", help="What followed the same N tokens before, or in the source."
        ),
        "draft_count": click.option("--draft-count", type=int, help="Tokens proposed at once.  [default: 4]"),
        "draft_rule": click.option("--draft-rule", help="shared or residual.  [default: shared]"),
    },
)


engine_option = click.option(
    "--engine",
    type=click.Choice(["auto", "torch", "compile", "packed", "packed-int8"]),
    default="auto",
    show_default=True,
    help="compile: a step that PyTorch compiles, a minute the first time; packed: a compiled pass over weights as they "
    "are stored; packed-int8: with activations of 8 bits; auto: packed where the pass knows the card "
    "and runs here, else torch.",
)


def loaded(given: dict[str, Any]) -> Model:
    """The model of -m, --dtype, --device, --revision and --engine; what loading noticed goes to standard error.

    `given["why"]` becomes a line about the engine that was taken where none was named.

    Raises:
        ScantlingInputError: what loading refuses, or options that the engine asked for does not have.
    """
    lm, given["why"] = engines.with_engine(given)
    for note in lm.notes:
        click.echo(f"note: {note}", err=True)
    return lm


def beams(searched: dict[str, Any]) -> Beams | None:
    """What --beams and its companions ask for.

    Raises:
        ScantlingInputError: a setting out of range, or one of beams without them.
    """
    if searched["beams"] is None:
        if searched["length_penalty"] != 1.0 or searched["early_stopping"]:
            raise ScantlingInputError("--length-penalty and --early-stopping are for --beams N")
        return None
    need("torch", "search by beams")
    from scantling.generate.beam import Beams

    return Beams(searched["beams"], searched["length_penalty"], searched["early_stopping"])


def options(given: dict[str, Any]) -> Options:
    """How a text is made, by all options but those of the draw.

    Raises:
        ScantlingInputError: a setting out of range, or a schema that cannot be read.
    """
    from scantling.generate.settings import Options

    kept = given["kept"]
    return Options(
        stop=given["stop"],
        keeping=_keeping(kept["kind"], kept["numbers"]),
        chunk=kept["chunk"],
        logprobs=given["logprobs"],
        shape=_shape(given["shaped"]),
        drafting=drafting(given),
        contrastive=_contrastive(given.get("contrasted")),
    )


def _contrastive(contrasted: dict[str, Any] | None) -> Contrastive | None:
    if contrasted is None:
        return None
    top_k, alpha = contrasted["contrastive"], contrasted["penalty_alpha"]
    if top_k is None and alpha is not None:
        raise ScantlingInputError("--penalty-alpha is for --contrastive K")
    if top_k is None:
        return None
    need("torch", "search contrastively")
    from scantling.generate.contrastive import Contrastive

    return Contrastive(top_k) if alpha is None else Contrastive(top_k, alpha)


def _keeping(kind: str, numbers: str) -> Keeping | None:
    if (kind, numbers) == ("full", "plain"):
        return None
    from scantling.generate.keeping import Keeping

    return Keeping(kind, numbers)


def _shape(shaped: dict[str, Any]) -> Shape | None:
    regex, path = shaped["regex"], shaped["schema"]
    if regex is None and path is None:
        return None
    need("torch", "constrain a text")
    from scantling.generate.constrain import Shape

    if path is None:
        return Shape(regex=regex)
    try:
        schema = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScantlingInputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return Shape(regex=regex, json_schema=schema)


def drafting(given: dict[str, Any]) -> Drafting | None:
    """Who proposes tokens, by what `draft_options` collected and by --dtype, --device and --revision.

    Raises:
        ScantlingInputError: a setting out of range, one of drafts without them, or what loading refuses.
    """
    drafted = given["drafted"]
    model, layers, lookup = (drafted[f"draft_{name}"] for name in ("model", "layers", "lookup"))
    more = {name: drafted[f"draft_{name}"] for name in ("count", "rule") if drafted[f"draft_{name}"] is not None}
    if model is None and layers is None and lookup is None:
        if more:
            raise ScantlingInputError(
                f"--draft-{min(more)} is for drafts: name who makes them, with --draft-model M, --draft-layers N or "
                "--draft-lookup N"
            )
        return None
    need("torch", "check drafts")
    from scantling.generate.speculative import Drafting
    from scantling.loading import load

    small = None
    if model is not None:
        small = load(model, dtype=given["dtype"], device=given["device"], revision=given["revision"])
    return Drafting(small, layers, lookup, **more)


def drafts_json(ledger: Ledger) -> dict[str, Any]:
    """How drafts fared, with the ratios."""
    return {**asdict(ledger), "acceptance": ledger.acceptance, "speed_up": ledger.speed_up}


def drafts_text(ledger: Ledger) -> str:
    """One line about how drafts fared."""
    if ledger.acceptance is None:
        return "drafts: none were made"
    gain = "" if ledger.speed_up is None else f", {ledger.speed_up:.2f} times the speed of plain steps"
    off = "; switched off, as they did not pay" if ledger.off else ""
    return f"drafts: {ledger.accepted} of {ledger.drafted} tokens stayed ({ledger.acceptance:.0%}){gain}{off}"
