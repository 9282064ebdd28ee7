"""`scantling size`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from scantling.cards import to_yaml
from scantling.cards.schema import Gated, MultiHead, Plain
from scantling.cli import show
from scantling.errors import ScantlingInputError
from scantling.study.laws import LAWS, Split, law, split
from scantling.study.size import Sized, Wish, fitting, near, parse_number
from scantling.units import bytes_text, count_text, flops_text, parse_bytes, weights_dtype


@click.command()
@click.option("--params", metavar="N", help="Cards near that many parameters: 1.3B, 350M.")
@click.option("--budget", metavar="C", help="Cards of the best size for that many training FLOPs: 1e21.")
@click.option("--fit", metavar="BYTES", help="The largest cards whose weights and cache fit: 24GiB.")
@click.option("--law", "law_name", default="epoch", show_default=True, help=f"For --budget: {', '.join(LAWS)}.")
@click.option("--context", type=click.IntRange(1, 2**32), default=4096, show_default=True, help="Longest sequence.")
@click.option("--batch", type=click.IntRange(1, 2**40), default=1, show_default=True, help="Rows, for --fit.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of weights and cache.")
@click.option("--vocab", type=click.IntRange(1, 2**24), default=32000, show_default=True, help="Tokens V.")
@click.option("--family", "style", type=click.Choice(["llama", "gpt2"]), default="llama", show_default=True)
@click.option("--tied", is_flag=True, help="The head's matrix is the token table.")
@click.option("--most", type=click.IntRange(1, 100), default=10, show_default=True, help="Cards to show.")
@click.option("--yaml", "pick", type=click.IntRange(1, 100), help="Print card number N of the list instead.")
@click.option("--out", type=click.Path(path_type=Path), help="Write a card (--yaml N, else the first) to this file.")
@show.json_option
@click.pass_context
def command(
    ctx: click.Context,
    params: str | None,
    budget: str | None,
    fit: str | None,
    law_name: str,
    context: int,
    batch: int,
    dtype: str,
    vocab: int,
    style: Any,
    tied: bool,
    most: int,
    pick: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Cards for a number of parameters, a training budget, or a memory; each assembled and counted.

    Give one of --params, --budget and --fit.
    """
    if sum(wish is not None for wish in (params, budget, fit)) != 1:
        raise click.UsageError("give one of --params, --budget and --fit", ctx)
    stored: Any = weights_dtype(dtype)
    if stored == "float64":
        raise ScantlingInputError("a card's weights are stored as float32, float16 or bfloat16, not as float64")
    wish = Wish(style, vocab, context, tied, stored)
    asked: dict[str, Any] = {"vocab_size": vocab, "context": context}
    most = max(most, pick or 1)
    splits: list[Split] = []
    if fit is not None:
        limit = parse_bytes(fit)
        asked |= {"limit_bytes": limit, "batch": batch}
        found = fitting(limit, wish, batch, most)
    elif budget is not None:
        spent, chosen = parse_number(budget), law(law_name)
        splits = [split(spent, each) for each in LAWS.values()]
        found = near(split(spent, chosen).params, wish, most)
        asked |= {"budget_flops": spent, "law": law_name}
    else:
        target = parse_number(str(params))
        asked["target_params"] = round(target)
        found = near(target, wish, most)
    if pick is not None or out is not None:
        _card(found, pick or 1, out)
    elif as_json:
        show.emit({**asked, **_laws(splits), "cards": [_json(sized) for sized in found]})
    else:
        _tables(found, splits, asked)


def _card(found: list[Sized], pick: int, out: Path | None) -> None:
    if pick > len(found):
        raise ScantlingInputError(f"--yaml {pick}: only {len(found)} cards were found")
    text = to_yaml(found[pick - 1].card)
    if out is None:
        click.echo(text, nl=False)
        return
    if out.suffix not in (".yaml", ".yml"):
        raise ScantlingInputError(f"{out}: a card is a .yaml file")
    if out.exists():
        raise ScantlingInputError(f"{out}: exists already; name another file")
    out.write_text(text, encoding="utf-8")
    click.echo(f"{found[pick - 1].card.name} is in {out}", err=True)


def _laws(splits: list[Split]) -> dict[str, Any]:
    rows = [
        {
            "law": s.law,
            "source": s.source,
            "params": round(s.params),
            "tokens": round(s.tokens),
            "tokens_per_param": s.tokens / s.params,
            "loss": s.loss,
        }
        for s in splits
    ]
    return {"laws": rows} if rows else {}


def _sizes(sized: Sized) -> dict[str, int]:
    card = sized.card
    assert isinstance(card.attention, MultiHead)
    assert isinstance(card.mlp, Gated | Plain)
    attention, mlp = card.attention, card.mlp
    return {
        "n_layers": card.n_layers,
        "d_model": card.d_model,
        "n_heads": attention.n_heads,
        "n_kv_heads": attention.n_kv_heads or attention.n_heads,
        "d_head": attention.d_head or 0,
        "d_ff": mlp.d_ff or 0,
    }


def _json(sized: Sized) -> dict[str, Any]:
    kept = {} if sized.memory is None else {"memory_bytes": sized.memory}
    about = {"name": sized.card.name, "params": sized.params, **_sizes(sized)}
    return {**about, "kv_cache_bytes_per_token": sized.kv_per_token, **kept, "card": to_yaml(sized.card)}


def _tables(found: list[Sized], splits: list[Split], asked: dict[str, Any]) -> None:
    if splits:
        show.say(f"{flops_text(asked['budget_flops'])} of training, C = 6 N D:")
        spent = [
            (
                "*" if s.law == asked["law"] else "",
                s.law,
                count_text(s.params),
                count_text(s.tokens),
                s.tokens / s.params,
                s.loss,
                s.source,
            )
            for s in splits
        ]
        show.table(("", "law", "N", "D, tokens", "D / N", "loss, nats", "source"), spent)
    target = asked.get("target_params") or next((s.params for s in splits if s.law == asked["law"]), None)
    rows = []
    for i, sized in enumerate(found, 1):
        if sized.memory is None:
            last = f"{100 * (sized.params / target - 1):+.2f} %" if target else ""
        else:
            last = bytes_text(sized.memory)
        rows.append((i, sized.card.name, sized.params, *_sizes(sized).values(), sized.kv_per_token, last))
    head = ("", "card", "parameters", "L", "d", "H", "H_kv", "D", "d_ff", "cache per token")
    show.table((*head, "from target" if target else "weights and cache"), rows)
    show.say("--yaml N prints a card, --out FILE writes one")
