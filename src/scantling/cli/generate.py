"""`scantling generate`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scantling.cli import drawing, engines, show
from scantling.errors import ScantlingError, ScantlingInputError, need
from scantling.units import bytes_text

if TYPE_CHECKING:
    from scantling.generate.settings import Generation, Options
    from scantling.model import Model
    from scantling.parts.part import Workload


ROWS = 16


@click.command()
@click.argument("prompt", required=False)
@click.option("-m", "--model", help="Folder, .safetensors, .gguf or hub id; default: SmolLM2-135M-Instruct.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@drawing.sampling_options
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated.")
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template, as a user's message.")
@click.option("--system", metavar="TEXT", help="Of --chat: what stands before the message.")
@click.option("--logprobs", type=int, metavar="N", help="With --json: each token's, and the N likeliest beside it.")
@drawing.search_options
@drawing.contrast_options
@drawing.shape_options
@drawing.cache_options
@drawing.draft_options
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE", help="A JSON line per prompt; with --out.")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE", help="A JSON line per text; goes on after a kill."
)
@click.option("--rows", type=click.IntRange(min=1), help="Of --prompts, decoded together.  [default: 16]")
@drawing.engine_option
@click.option("--dtype", help="Of the weights; default: the file's (float32 for GGUF).")
@click.option("--device", default="cpu", show_default=True)
@show.revision_option
@show.json_option
def command(prompt: str | None, **given: Any) -> None:
    """Continue PROMPT, streaming; then say what prefill and decode took, measured beside predicted.

    Of an encoder-decoder, PROMPT is the source, and what it makes of it is printed. A PROMPT of - is read from standard
    input, without the end of its last line.
    """
    prompts, out = given["prompts"], given["out"]
    prompt = show.standard_input() if prompt == "-" else prompt
    if (prompts is None) != (out is None) or (prompts is None) == (prompt is None):
        raise ScantlingInputError("give a PROMPT, or --prompts FILE and --out FILE together")
    if prompt == "":
        raise ScantlingInputError("the prompt is empty: at least one character is needed to go on from")
    if prompt is not None and given["rows"] is not None:
        raise ScantlingInputError("--rows is for --prompts FILE: one PROMPT is one row")
    if given["logprobs"] is not None and not given["as_json"]:
        raise ScantlingInputError("--logprobs goes with --json: they are not printed beside the text")
    if given["system"] is not None and not given["chat"]:
        raise ScantlingInputError("--system is for --chat: it stands before the message in the model's chat template")
    need("numpy", "generate text")
    sampling, options = drawing.sampling(given["drawn"]), drawing.options(given)
    if prompt is None:
        _check_many(given, options)
    lm = drawing.loaded(given)
    if prompt is None:
        _many(lm, given, sampling, options)
        return
    text = _message(lm, prompt, given) if given["chat"] else prompt
    made = _made(lm, text, given, sampling, options)
    why = [given["why"]] if given["why"] else []
    if options.shape is not None and made[0].finish_reason == "length":
        why.append(f"note: cut after {made[0].new_tokens} tokens, before what the text must match was at its end")
    if given["as_json"]:
        for line in why:
            click.echo(line, err=True)
        show.emit(_json(lm, made, options))
        return
    show.say()
    for line in (*why, *report(lm, made[0], options)):
        click.echo(line, err=True)


def _message(lm: Model, text: str, given: dict[str, Any]) -> str:
    """A user's message in the model's chat template."""
    from scantling.generate.text import templated

    system = [] if given["system"] is None else [{"role": "system", "content": given["system"]}]
    return templated(lm, [*system, {"role": "user", "content": text}], "--chat")


def _made(lm: Model, text: str, given: dict[str, Any], sampling: Any, options: Options) -> list[Generation]:
    """The texts, the best first; one text is written as it comes."""
    from scantling.generate.text import complete

    beams, limit, count = drawing.beams(given["searched"]), given["max_new_tokens"], given["searched"]["best_of"]
    if beams is None and count == 1:
        try:
            return [complete(lm, text, limit, sampling, options, show=None if given["as_json"] else _write)]
        except ScantlingError:
            if sys.stdout.isatty():
                # The sentence that follows has a line of its own, also behind half a text.
                show.say()
            raise
    need("torch", "search for the best text")
    from scantling.generate.api import Asked, texts

    made = texts(lm, text, Asked().wanted(limit, sampling, options, beams, count))
    if not given["as_json"]:
        click.echo(made[0].text, nl=False)
    return made


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _many(lm: Model, given: dict[str, Any], sampling: Any, options: Options) -> None:
    """`--prompts FILE --out FILE`."""
    need("torch", "decode several prompts")
    from scantling.generate.prompt_lines import read_prompts
    from scantling.generate.prompts import limits_for, run_prompts
    from scantling.generate.request import Request

    default = Request("", given["max_new_tokens"], sampling, options)
    prepared = (lambda text: _message(lm, text, given)) if given["chat"] else None
    by = " ".join(str(given[name]) for name in ("model", "revision") if given[name] or name == "model")
    rounded = f" {lm.packed.activations}" if lm.packed is not None and lm.packed.activations != "exact" else ""
    width = lm.dtype if lm.packed is None else "torch.float32"
    lines = read_prompts(given["prompts"], default, f"{by} {width}{rounded}", prepared)
    limits = limits_for(lm, lines, given["rows"] or ROWS)
    new, old = run_prompts(lm, lines, given["out"], limits, _progress())
    if given["why"]:
        click.echo(given["why"], err=True)
    if given["as_json"]:
        show.emit({"written": new, "already_there": old, "out": str(given["out"])})
    else:
        click.echo(f"{new} written to {given['out']}, {old} were there", err=True)


def _check_many(given: dict[str, Any], options: Options) -> None:
    if not given["prompts"].exists():
        raise ScantlingInputError(f"{given['prompts']}: cannot be read: no such file")
    if not given["out"].parent.is_dir():
        raise ScantlingInputError(f"{given['out']}: cannot be written: no such folder")
    one_by_one = {
        "--beams": given["searched"]["beams"] is not None,
        "--best-of": given["searched"]["best_of"] != 1,
        "--logprobs": options.logprobs is not None,
        "--cache": options.keeping is not None,
        "--prefill-chunk": options.chunk is not None,
        "--draft-...": options.drafting is not None,
        "--contrastive": options.contrastive is not None,
    }
    if found := [name for name, asked in one_by_one.items() if asked]:
        raise ScantlingInputError(f"{found[0]} is for one PROMPT: --prompts decodes several together")


def _progress() -> Callable[[int, int, int], None]:
    """A line that is written anew on a terminal, and now and then elsewhere."""
    tty, began, last = sys.stderr.isatty(), time.perf_counter(), [0.0]

    def say(done: int, count: int, tokens: int) -> None:
        now = time.perf_counter()
        if done < count and now - last[0] < (0.2 if tty else 10.0):
            return
        last[0] = now
        line = f"{done} of {count} prompts, {tokens} tokens, {tokens / (now - began):.1f} tokens/s"
        # A shorter line leaves nothing of the one before.
        click.echo(f"\r{line:<79}" if tty else line, err=True, nl=not tty or done == count)

    return say


def predicted(lm: Model, done: Generation, options: Options) -> dict[str, int]:
    """What the part tree says of this generation: FLOPs, cache bytes, and bytes that a decoded token must read."""
    from scantling.numbers.cache import cache_bytes, cache_read
    from scantling.numbers.flops import decode, flops
    from scantling.numbers.memory import memory
    from scantling.numbers.reading import weights_read
    from scantling.parts.part import Workload

    steps, rows = done.steps, done.rows
    # The prompt of an encoder-decoder is its source, and the target begins with one token.
    source, first = (done.prompt_tokens, 1) if lm.parts.two_stacks else (None, done.prompt_tokens)
    tokens = done.limit if lm.parts.two_stacks else done.prompt_tokens + done.limit
    # Of a contrastive search the candidates for the last token are read too.
    tokens += int(lm.parts.two_stacks and options.contrastive is not None)
    whole = Workload(batch=rows, tokens=tokens, source=source)
    keeping = options.keeping
    kind, numbers = ("full", "plain") if keeping is None else (keeping.kind, keeping.numbers)
    if lm.packed is not None and keeping is None:
        return _predicted_packed(lm, done, whole, options)
    width = str(lm.dtype).removeprefix("torch.")
    read = cache_read(lm.parts, Workload(rows, past=first + steps // 2, source=source), width, numbers)
    return {
        "prefill_flops": flops(lm.parts, Workload(tokens=first, source=source, last_only=True)).forward,
        "decode_flops": rows * decode(lm.parts, first, steps, source) if steps else 0,
        "cache_bytes": cache_bytes(lm.parts, whole, width, kind, numbers) + _of_drafts(lm, options, whole),
        "weights_bytes": memory(lm.parts, whole, width, width).weights,
        "bytes_read_per_token": weights_read(lm.parts, width, rows, source) + read,
    }


def _of_drafts(lm: Model, options: Options, whole: Workload) -> int:
    """Bytes of the cache of a draft model; of an early exit, where the model's own is that of a compiled pass."""
    from scantling.cards.rules import position_limit
    from scantling.numbers.cache import cache_bytes
    from scantling.parts.part import Workload

    drafting, small, parts = options.drafting, lm, None
    if drafting is not None and drafting.model is not None:
        small, parts = drafting.model, drafting.model.parts
    elif drafting is not None and drafting.layers is not None and engines.engine_of(lm, options) != "torch":
        from scantling.generate.draft import ended

        parts = ended(lm.parts, drafting.layers)
    if parts is None:
        return 0
    tokens = min(whole.tokens, position_limit(small.card) or whole.tokens)
    numbers = "plain" if options.keeping is None else options.keeping.numbers
    width = str(small.dtype).removeprefix("torch.")
    return cache_bytes(parts, Workload(tokens=tokens, source=whole.source), width, "full", numbers)


def _predicted_packed(lm: Model, done: Generation, whole: Workload, options: Options) -> dict[str, int]:
    """The same of the compiled pass, whose weights are as wide as their tiles and whose cache is float32."""
    from scantling.native.tiles import ROWS, padded
    from scantling.numbers.cache import cache_bytes
    from scantling.numbers.flops import decode, flops
    from scantling.parts.part import Workload

    assert lm.packed is not None
    steps, prompt, rows = done.steps, done.prompt_tokens, done.rows
    d_head, stored = lm.packed.weights.outline.attention.d_head, lm.packed.weights.outline.d_head
    each = cache_bytes(lm.parts, Workload(tokens=1), "float32", "full", "plain") // d_head * stored
    return {
        "prefill_flops": flops(lm.parts, Workload(tokens=prompt, last_only=True)).forward,
        "decode_flops": rows * decode(lm.parts, prompt, steps) if steps else 0,
        "cache_bytes": rows * each * padded(whole.tokens, ROWS) + _of_drafts(lm, options, whole),
        "weights_bytes": lm.packed.weights.nbytes,
        "bytes_read_per_token": lm.packed.weights.read_nbytes + rows * each * (prompt + steps // 2),
    }


def _json(lm: Model, made: list[Generation], options: Options) -> dict[str, Any]:
    done = made[0]
    found: dict[str, Any] = {
        "text": done.text,
        "engine": engines.engine_of(lm, options),
        "prompt_tokens": done.prompt_tokens,
        "new_tokens": done.new_tokens,
        "finish_reason": done.finish_reason,
        "context_full": done.context_full,
        "prefill_seconds": done.prefill_seconds,
        "decode_seconds": done.decode_seconds,
        "cache_bytes": done.cache_bytes,
        "predicted": predicted(lm, done, options),
    }
    if options.logprobs is not None and done.logprobs is not None:
        assert lm.tokenizer is not None
        # As the vocabulary spells them; an id may stand for none.
        spelt = lm.tokenizer.tokens()
        found["logprobs"] = [
            {
                "id": token.id,
                "token": spelt[token.id],
                "logprob": token.logprob,
                "top": [{"id": i, "token": spelt[i], "logprob": p} for i, p in token.top],
            }
            for token in done.logprobs
        ]
    if done.ledger is not None:
        found["drafts"] = drawing.drafts_json(done.ledger)
    if len(made) > 1:
        found["texts"] = [one.text for one in made]
    return found


def report(lm: Model, done: Generation, options: Options) -> list[str]:
    """Prefill and decode apart, measured beside predicted."""
    p = predicted(lm, done, options)
    rate = done.prompt_tokens / done.prefill_seconds
    lines = [
        f"prefill: {done.prompt_tokens} tokens in {done.prefill_seconds:.3f} s, {rate:.1f} tokens/s; "
        f"{p['prefill_flops'] / 1e9:.2f} GFLOP predicted, {p['prefill_flops'] / done.prefill_seconds / 1e9:.1f} GFLOP/s"
    ]
    if done.steps > 0:
        each = done.decode_seconds / done.steps
        read = p["bytes_read_per_token"]
        of = "token" if done.rows == 1 else f"step of {done.rows} rows"
        what = "tokens" if done.rows == 1 else "steps"
        lines.append(
            f"decode: {done.steps} steps in {done.decode_seconds:.3f} s, {1 / each:.1f} {what}/s; "
            f"{bytes_text(read)} of weights and cache read per {of} predicted, {read / each / 1e9:.1f} GB/s"
        )
    if done.ledger is not None:
        lines.append(drawing.drafts_text(done.ledger))
    same = "as predicted" if done.cache_bytes == p["cache_bytes"] else f"{p['cache_bytes']:,} predicted"
    torch = lm.packed is None or options.keeping is not None
    where = f"{str(lm.dtype).removeprefix('torch.')} on {lm.device}" if torch else "float32 in the compiled pass"
    why = f"{done.finish_reason}: the context of {lm.card.context} is full" if done.context_full else done.finish_reason
    lines.append(f"cache: {done.cache_bytes:,} bytes, {same}; {where}; ended by {why}")
    return lines
