"""`scantling generate`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from scantling.cli import show
from scantling.errors import ScantlingInputError
from scantling.units import bytes_text

if TYPE_CHECKING:
    from scantling.generate.engine import Generation
    from scantling.model import Model


@click.command()
@click.argument("prompt")
@click.option("-m", "--model", help="Folder, .safetensors, .gguf or hub id; default: SmolLM2-135M-Instruct.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, help="Keep the k likeliest tokens; 0 keeps all.")
@click.option("--top-p", type=float, default=1.0, help="Keep the likeliest tokens up to this mass.")
@click.option("--min-p", type=float, default=0.0, help="Keep tokens this likely beside the likeliest.")
@show.seed_option
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated.")
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template, as a user's message.")
@click.option("--dtype", help="Of the weights; default: the file's (float32 for GGUF).")
@click.option("--device", default="cpu", show_default=True)
@show.revision_option
@show.json_option
def command(
    prompt: str,
    model: str | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    stop: tuple[str, ...],
    chat: bool,
    dtype: str | None,
    device: str,
    revision: str | None,
    as_json: bool,
) -> None:
    """Continue PROMPT, streaming; then say what prefill and decode took, measured beside predicted.

    Of an encoder-decoder, PROMPT is the source, and what it makes of it is printed.
    """
    if not prompt:
        raise ScantlingInputError("the prompt is empty: at least one character is needed to go on from")
    from scantling.errors import need

    need("torch", "generate text")
    from scantling.generate.engine import Options, complete
    from scantling.generate.sample import Sampling
    from scantling.model import load

    sampling = Sampling(temperature, top_k, top_p, min_p, seed)
    lm = load(model, dtype=dtype, device=device, revision=revision)
    for note in lm.notes:
        click.echo(f"note: {note}", err=True)
    if temperature == 0 and (top_k or top_p < 1 or min_p or seed is not None):
        click.echo(
            "note: temperature is 0, the likeliest token: --top-k, --top-p, --min-p and --seed do nothing", err=True
        )
    text = _chat(lm, prompt) if chat else prompt

    def write(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    done = complete(lm, text, max_new_tokens, sampling, Options(stop=stop), show=None if as_json else write)
    if as_json:
        show.emit(_json(lm, done))
        return
    show.say()
    for line in report(lm, done):
        click.echo(line, err=True)


def _chat(lm: Model, prompt: str) -> str:
    from scantling.text.template import render

    tokenizer = lm.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        raise ScantlingInputError("--chat: the model has no chat template; leave the option out, or name a chat model")
    messages = [{"role": "user", "content": prompt}]
    return render(tokenizer.chat_template, messages, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)


def predicted(lm: Model, done: Generation) -> dict[str, int]:
    """What the part tree says of this generation: FLOPs, cache bytes, and bytes that a decoded token must read."""
    from scantling.numbers.flops import decode, flops
    from scantling.numbers.memory import memory, read_per_token
    from scantling.parts.part import Workload

    width = str(lm.dtype).removeprefix("torch.")
    steps = done.new_tokens - 1
    # The prompt of an encoder-decoder is its source, and the target begins with one token.
    source, first = (done.prompt_tokens, 1) if lm.parts.two_stacks else (None, done.prompt_tokens)
    whole = done.limit if lm.parts.two_stacks else done.prompt_tokens + done.limit
    room = memory(lm.parts, Workload(tokens=whole, source=source), width, width)
    return {
        "prefill_flops": flops(lm.parts, Workload(tokens=first, source=source, last_only=True)).forward,
        "decode_flops": decode(lm.parts, first, steps, source) if steps else 0,
        "cache_bytes": room.kv,
        "weights_bytes": room.weights,
        "bytes_read_per_token": read_per_token(lm.parts, first + steps // 2, width, source),
    }


def _json(lm: Model, done: Generation) -> dict[str, Any]:
    return {
        "text": done.text,
        "prompt_tokens": done.prompt_tokens,
        "new_tokens": done.new_tokens,
        "finish_reason": done.finish_reason,
        "prefill_seconds": done.prefill_seconds,
        "decode_seconds": done.decode_seconds,
        "cache_bytes": done.cache_bytes,
        "predicted": predicted(lm, done),
    }


def report(lm: Model, done: Generation) -> list[str]:
    """Prefill and decode apart, measured beside predicted."""
    p = predicted(lm, done)
    rate = done.prompt_tokens / done.prefill_seconds
    lines = [
        f"prefill: {done.prompt_tokens} tokens in {done.prefill_seconds:.3f} s, {rate:.1f} tokens/s; "
        f"{p['prefill_flops'] / 1e9:.2f} GFLOP predicted, {p['prefill_flops'] / done.prefill_seconds / 1e9:.1f} GFLOP/s"
    ]
    steps = done.new_tokens - 1
    if steps > 0:
        each = done.decode_seconds / steps
        read = p["bytes_read_per_token"]
        lines.append(
            f"decode: {steps} steps in {done.decode_seconds:.3f} s, {1 / each:.1f} tokens/s; "
            f"{bytes_text(read)} of weights and cache read per token predicted, {read / each / 1e9:.1f} GB/s"
        )
    same = "as predicted" if done.cache_bytes == p["cache_bytes"] else f"{p['cache_bytes']:,} predicted"
    width = str(lm.dtype).removeprefix("torch.")
    lines.append(f"cache: {done.cache_bytes:,} bytes, {same}; {width} on {lm.device}; ended by {done.finish_reason}")
    return lines
