"""`scantling memory`."""

from __future__ import annotations

import click

from scantling.assembly import assemble
from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.numbers.memory import memory
from scantling.units import bytes_text, storage_dtype


@click.command()
@click.argument("model")
@show.workload_options()
@click.option("--dtype", default="bfloat16", help="Of the weights.", show_default=True)
@click.option("--cache-dtype", default="bfloat16", help="Of keys and values.", show_default=True)
@show.revision_option
@show.json_option
def command(
    model: str,
    batch: int,
    tokens: int | None,
    past: int,
    source_tokens: int | None,
    dtype: str,
    cache_dtype: str,
    revision: str | None,
    as_json: bool,
) -> None:
    """Memory of inference, line by line: weights, KV cache, logits, and the score matrix that a fused kernel avoids."""
    card = card_of(model, revision=revision)
    weights, cache = storage_dtype(dtype), storage_dtype(cache_dtype)
    w = show.workload(card, batch, tokens, past, source_tokens)
    m = memory(assemble(card), w, weights, cache)
    if as_json:
        show.emit(
            {
                "name": card.name,
                "batch": w.batch,
                "tokens": w.tokens,
                "past": w.past,
                **show.sources(card, w),
                "dtype": weights,
                "cache_dtype": cache,
                "weights_bytes": m.weights,
                "kv_cache_bytes_per_token": m.kv_per_token,
                "kv_cache_bytes": m.kv,
                "logits_bytes": m.logits,
                "scores_bytes": m.scores,
                "total_bytes": m.total,
            }
        )
        return
    show.say(f"{card.name}, {show.sizes(card, w)}")
    show.say()
    rows = [
        (f"weights, {weights}", m.weights, bytes_text(m.weights)),
        (f"KV cache, {cache}, {w.batch} x {w.keys:,} positions", m.kv, bytes_text(m.kv)),
        ("logits of every position, float32", m.logits, bytes_text(m.logits)),
        ("total: weights, cache, logits; no activations", m.total, bytes_text(m.total)),
        ("one position of one row in the cache", m.kv_per_token, bytes_text(m.kv_per_token)),
        (f"scores of one layer, {weights}, if a kernel stores them", m.scores, bytes_text(m.scores)),
    ]
    show.table(("what", "bytes", ""), rows)
