"""`scantling cost`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from scantling.assembly import assemble
from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.errors import ScantlingInputError
from scantling.numbers import mfu
from scantling.numbers.cost import CONVENTIONS, Run, Work, run, work, work_of
from scantling.numbers.hardware import Device, arithmetic, device, devices
from scantling.units import count_text, flops_text, parse_count

POSITIVE = click.FloatRange(min=0, min_open=True)


@dataclass(frozen=True)
class Answer:
    """What is shown: the work, the run, and the prices of a device-hour in money and in power."""

    name: str
    done: Work
    convention: str
    row: Device | None
    dtype: str
    plan: Run
    price: float | None
    watts: float | None


@click.command()
@click.argument("model", required=False)
@click.option("--params", metavar="N", help="Active parameters instead of MODEL, 7B; 6ND only.")
@click.option("--train-tokens", metavar="D", required=True, help="Tokens trained on, 2T.")
@click.option("--context", type=click.IntRange(1, 2**40), help="Tokens per row. [default: the model's context]")
@click.option("--convention", type=click.Choice(list(CONVENTIONS)), default="6nd", show_default=True, help="Of FLOPs.")
@click.option("--devices", "n_devices", type=click.IntRange(1, 10**9), default=1, show_default=True, help="At once.")
@click.option("--device", "device_name", metavar="NAME", help="h100, a100-80gb, ..., or a path with one row.")
@click.option("--device-file", type=click.Path(path_type=Path), metavar="F", help="More devices, YAML.")
@click.option("--dtype", default="bf16", show_default=True, help="fp32, tf32, bf16, fp16, fp8 or int8.")
@click.option("--peak", type=POSITIVE, metavar="TFLOPS", help="Dense peak of a device, instead of the table's.")
@click.option("--tflops", type=POSITIVE, metavar="X", help="TFLOP/s that each device reaches.")
@click.option("--mfu", "share", metavar="X", help="Share of the peak, 0.4 or 40%.")
@click.option("--days", type=POSITIVE, help="Measured or allowed time.")
@click.option("--hours", type=POSITIVE)
@click.option("--seconds", type=POSITIVE)
@click.option("--price", type=click.FloatRange(min=0), metavar="P", help="Money per device-hour.")
@click.option("--watts", type=POSITIVE, metavar="W", help="Per device. [default: the device's limit]")
@show.revision_option
@show.json_option
def command(
    model: str | None,
    params: str | None,
    train_tokens: str,
    context: int | None,
    convention: str,
    n_devices: int,
    device_name: str | None,
    device_file: Path | None,
    dtype: str,
    peak: float | None,
    tflops: float | None,
    share: str | None,
    days: float | None,
    hours: float | None,
    seconds: float | None,
    price: float | None,
    watts: float | None,
    revision: str | None,
    as_json: bool,
) -> None:
    """What training costs: FLOPs, time, device-hours, money, energy, and MFU against the dense peak.

    One of --tflops, --mfu and a time gives the others; with none of them 40 % of the peak is assumed.
    """
    name, done = _work(model, params, train_tokens, context, revision)
    plain = arithmetic(dtype)
    row = None if device_name is None else device(device_name, device_file)
    dense = _peak(row, plain, peak)
    plan = run(done.total(convention), n_devices, dense, tflops, _share(share), _time(days, hours, seconds))
    watts = watts if watts is not None else row.watts if row else None
    answer = Answer(name, done, convention, row, plain, plan, price, watts)
    if as_json:
        show.emit(_data(answer))
    else:
        _print(answer)


def _work(model: str | None, params: str | None, tokens: str, context: int | None, rev: str | None) -> tuple[str, Work]:
    trained = parse_count(tokens, "--train-tokens")
    if (model is None) == (params is None):
        raise ScantlingInputError("give either MODEL or --params N, a number of active parameters")
    if model is None or params is not None:
        if context is not None:
            raise ScantlingInputError("--context needs a MODEL: 6ND does not depend on the length of a row")
        return f"{params} parameters", work_of(parse_count(params or "", "--params"), trained)
    card = card_of(model, revision=rev)
    w = show.workload(card, 1, context, 0)
    return card.name, work(assemble(card), trained, w.tokens)


def _peak(row: Device | None, dtype: str, peak: float | None) -> float | None:
    if peak is None:
        return None if row is None else row.peak(dtype)
    return mfu.checked_peak(peak * 1e12, dtype, row, devices())


def _share(text: str | None) -> float | None:
    """``0.4`` and ``40%`` are the same."""
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise ScantlingInputError(f"--mfu is {text!r}; a share of the peak above 0 and up to 1 is needed: 0.4 or 40%")
    return value


def _time(days: float | None, hours: float | None, seconds: float | None) -> float | None:
    stated = [x * y for x, y in ((days, 86400), (hours, 3600), (seconds, 1)) if x is not None]
    if len(stated) > 1:
        raise ScantlingInputError("the time is given twice: use one of --days, --hours and --seconds")
    return stated[0] if stated else None


def _verdict(plan: Run) -> str | None:
    """Of a speed that was reached or measured; an assumed share is not judged."""
    return None if plan.mfu is None or plan.given in ("mfu", "assumed") else mfu.verdict(plan.mfu)


def _data(a: Answer) -> dict[str, object]:
    done, plan, row = a.done, a.plan, a.row
    return {
        "name": a.name,
        "params": done.params,
        "active_params": done.active,
        "tokens": done.tokens,
        "context": done.context,
        "convention": a.convention,
        "total_flops": plan.total_flops,
        "flops_by_convention": done.flops,
        "device": row.name if row else None,
        "device_source": row.source if row else None,
        "devices": plan.devices,
        "dtype": a.dtype,
        "dense_peak_tflops": None if plan.peak is None else plan.peak / 1e12,
        "set_by": plan.given,
        "seconds": plan.seconds,
        "days": plan.days,
        "device_hours": plan.device_hours,
        "tflops": plan.rate / 1e12,
        "mfu": plan.mfu,
        "verdict": _verdict(plan),
        "price": a.price,
        "money": None if a.price is None else plan.money(a.price),
        "watts": a.watts,
        "kwh": None if a.watts is None else plan.energy(a.watts),
    }


def _print(a: Answer) -> None:
    done, plan = a.done, a.plan
    at = "" if done.context is None else f" in rows of {done.context:,}"
    show.say(f"{a.name}, {count_text(done.tokens)} tokens{at}: {flops_text(plan.total_flops)} ({a.convention})")
    show.say()
    rows = [
        (key, CONVENTIONS[key], n, f"{n:.4g}", "used below" if key == a.convention else "")
        for key, n in done.flops.items()
    ]
    show.table(("convention", "what is counted", "training FLOPs", "", ""), rows)
    by = {"tflops": "--tflops", "mfu": "--mfu", "seconds": "the time given", "assumed": "an assumed MFU of 40 %"}
    lines = [
        (
            f"time of {plan.devices:,} x {a.row.name if a.row else 'devices'}",
            f"{plan.days:,.4g} days ({plan.seconds:,.0f} s), by {by[plan.given]}",
        ),
        ("device-hours", f"{plan.device_hours:,.0f}"),
        ("speed per device", f"{plan.rate / 1e12:,.4g} TFLOP/s"),
    ]
    if plan.mfu is not None and plan.peak is not None:
        share = f"{100 * plan.mfu:.1f} % of the dense peak in {a.dtype}, {plan.peak / 1e12:,.5g} TFLOP/s"
        lines.append(("MFU", "; ".join(filter(None, (share, _verdict(plan))))))
    if a.price is not None:
        lines.append(("money", f"{plan.money(a.price):,.0f} at {a.price:g} per device-hour"))
    if a.watts is not None:
        lines.append(("energy", f"{plan.energy(a.watts):,.0f} kWh at {a.watts:g} W each, without host and cooling"))
    show.table(("what", ""), lines)
