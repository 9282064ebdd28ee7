"""The report of a run: plots as PNG, and one HTML file that holds them with predicted beside measured."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scantling.train.watch import read_metrics
from scantling.units import bytes_text, flops_text

REPORT = "report.html"
PLOTS = "plots"

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.3rem .8rem;border-bottom:1px solid #ddd;text-align:left}"
    "img{max-width:100%}pre{white-space:pre-wrap;background:#f5f5f5;padding:.6rem}"
)


def write_report(run: Path, name: str) -> Path:
    """Write RUN/plots/*.png and RUN/report.html from RUN/metrics.jsonl.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the folder cannot be written.
    """
    records = read_metrics(run)
    plots = _plots(records, run / PLOTS)
    images = "".join(
        f'<h2>{html.escape(title)}</h2><img alt="{html.escape(title)}" '
        f'src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'
        for title, path in plots.items()
    )
    samples = [r for r in records if r["kind"] == "sample"][-3:]
    texts = "".join(f"<p>update {r['step']}</p><pre>{html.escape(r['text'])}</pre>" for r in samples)
    notes = "".join(f"<li>{html.escape(r['text'])}</li>" for r in records if r["kind"] == "note")
    body = (
        f"<h1>{html.escape(name)}</h1>{_table('How it ended', _ending(records))}"
        f"{_table('Predicted and measured', accounts(records), ('what', 'predicted', 'measured', ''))}"
        f"{images}<h2>Samples</h2>{texts}" + (f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "")
    )
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(name)}</title>'
    path = run / REPORT
    path.write_text(f"{head}<style>{_STYLE}</style><body>{body}</body></html>\n", encoding="utf-8")
    return path


def _ending(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    steps = [r for r in records if r["kind"] == "step"]
    held = [r for r in records if r["kind"] == "evaluation"]
    rows: list[tuple[str, ...]] = [
        ("updates", f"{steps[-1]['step']:,}"),
        ("last training loss", f"{float(steps[-1]['loss']):.4f} nats"),
    ]
    if held:
        rows.append(("held-out loss", f"{held[-1]['loss']:.4f} nats over {held[-1]['tokens']:,} tokens"))
        rows.append(("perplexity", f"{float(held[-1]['perplexity']):.3f}"))
        if held[-1]["bits_per_byte"] is not None:
            rows.append(("bits per byte", f"{held[-1]['bits_per_byte']:.4f}"))
    rows.append(("tokens per second", f"{steps[-1]['tokens_per_second']:,.0f}"))
    return rows


def accounts(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """What, predicted, measured, and how each was found, from the last account of a run."""
    found = [r for r in records if r["kind"] == "account"]
    if not found:
        return []
    a = found[-1]
    counted = a["flops_counted"]
    equal = "not counted with several processes"
    if counted is not None:
        word = "equal" if a["flops_predicted"] == counted else "not equal"
        equal = f"{word}; counted by torch with the math kernel of attention"
    rows: list[tuple[str, ...]] = [
        (
            "FLOPs of a micro-batch",
            flops_text(a["flops_predicted"]),
            "" if counted is None else flops_text(counted),
            f"{equal}; {a['convention']}",
        ),
        (
            "time of all updates",
            f"{a['seconds_at_peak']:,.1f} s",
            f"{a['seconds']:,.1f} s",
            f"predicted at the peak of {flops_text(a['peak'])}/s ({a['peak_source']}): MFU {100 * a['mfu']:.1f} %, by "
            f"{a['mfu_convention']}",
        ),
    ]
    if a.get("memory_predicted") is not None and a.get("memory_measured") is not None:
        rows.append(
            ("memory", bytes_text(a["memory_predicted"]), bytes_text(a["memory_measured"]), a["memory_convention"])
        )
    return rows


def _table(title: str, rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    if not rows:
        return ""
    top = "<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>" if head else ""
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<h2>{html.escape(title)}</h2><table>{top}{lines}</table>"


def _plots(records: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Path]:
    """Draw what there is to draw; titles and files."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    steps = [r for r in records if r["kind"] == "step"]
    held = [r for r in records if r["kind"] == "evaluation"]
    x = [r["step"] for r in steps]
    drawn: dict[str, tuple[str, list[tuple[str, list[int], list[float]]]]] = {
        "Loss": ("nats", [("training", x, _numbers(steps, "loss"))]),
        "Learning rate": ("", [("rate", x, _numbers(steps, "lr"))]),
        "Norm of the gradient": (
            "",
            [(b, x, [float(r["norms"].get(b, "nan")) for r in steps]) for b in _blocks(steps)],
        ),
        "Speed": ("tokens per second", [("tokens per second", x, _numbers(steps, "tokens_per_second"))]),
    }
    if held:
        drawn["Loss"][1].append(("held out", [r["step"] for r in held], _numbers(held, "loss")))
    if steps and "routers" in steps[-1]:
        routers = list(steps[-1]["routers"])
        lines = [(p, x, [float(r["routers"][p]["entropy"]) for r in steps if "routers" in r]) for p in routers]
        drawn["Entropy of the routers"] = ("nats", lines)
    files = {}
    for title, (unit, lines) in drawn.items():
        figure = Figure(figsize=(8, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for label, at, values in lines:
            axes.plot(at[: len(values)], values, label=label)
        axes.set(xlabel="update", ylabel=unit, title=title)
        axes.grid(alpha=0.3)
        if len(lines) > 1:
            axes.legend(fontsize="small", ncols=2)
        files[title] = folder / f"{title.lower().replace(' ', '-')}.png"
        figure.savefig(files[title], dpi=120)
    return files


def _numbers(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(r[name]) for r in records]


def _blocks(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(steps[-1]["norms"]) if steps else []
