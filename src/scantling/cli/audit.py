"""`scantling audit`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scantling.cli import show
from scantling.errors import ScantlingInputError, need

if TYPE_CHECKING:
    from scantling.audits import Report
    from scantling.audits.certify import Trial


@click.command()
@click.argument("model", required=False)
@click.option("--certify", is_flag=True, help="Run the planted faults of each probe instead of a model.")
@click.option("--library", type=click.Choice(["scantling", "transformers"]), default="scantling", show_default=True)
@click.option("--against", type=click.Choice(["scantling", "transformers"]), help="A second implementation.")
@click.option("--probe", "probes", multiple=True, metavar="NAME", help="Only this one; may be repeated.")
@click.option("--tokens", type=click.IntRange(4, 4096), default=18, show_default=True, help="Of an ordinary row.")
@click.option(
    "--longest", type=click.IntRange(4, 2**17), default=320, show_default=True, help="Where length is the question."
)
@click.option("--dtype", help="Of the weights; default: the file's.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Also write a page.")
@show.seed_option
@show.revision_option
@show.json_option
@click.pass_context
def command(
    ctx: click.Context,
    model: str | None,
    certify: bool,
    library: str,
    against: str | None,
    probes: tuple[str, ...],
    tokens: int,
    longest: int,
    dtype: str | None,
    device: str,
    html: Path | None,
    seed: int | None,
    revision: str | None,
    as_json: bool,
) -> None:
    """Look for the classic failure modes of Transformers in MODEL. Exit status 1 if there is a defect.

    Without MODEL, SmolLM2-135M-Instruct; a preset or a card gets initial weights. --library transformers audits the
    same folder as that library runs it; --against compares the two. docs/audit.md says what each probe asks and how a
    fault is told from rounding.
    """
    need("torch", "audit a model")
    if certify:
        if model is not None or html is not None:
            raise ScantlingInputError("--certify runs planted faults: it takes no MODEL and writes no page")
        ctx.exit(_certify(probes, as_json))
    from scantling.audits import Effort, examine
    from scantling.audits.examine import named as probes_named
    from scantling.audits.report import write_html
    from scantling.subjects.named import Loading, named

    asked = [probe.name for probe in probes_named(probes or None)]
    if html is not None and not html.parent.is_dir():
        raise ScantlingInputError(f"--html {html}: the folder {html.parent} does not exist")
    if longest < tokens:
        raise ScantlingInputError(f"--longest {longest} is less than --tokens {tokens}")
    subject = named(model, library, against, Loading(dtype, device, revision, longest))
    with _progress(len(asked)) as step:
        report = examine(subject, asked, Effort(tokens, longest, seed or 0), step)
    if html is not None:
        write_html(report, html)
        click.echo(f"page: {html}", err=True)
    if as_json:
        show.emit(report.as_json())
    else:
        _print(report)
    ctx.exit(1 if report.defects else 0)


def _print(report: Report) -> None:
    rows = [(f.probe, str(f.verdict), size_text(f.size, f.unit), f.where, f.message) for f in report.findings]
    show.table(("probe", "verdict", "size", "where", "what it means"), rows)
    for finding in report.defects:
        if finding.smallest:
            show.say(f"{finding.probe}, {finding.where}: smallest input")
            for key, value in finding.smallest.items():
                show.say(f"  {key}: {value}")
    counts = {verdict: n for verdict, n in report.as_json()["counts"].items() if n}
    show.say(f"{report.name}: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))


def size_text(size: float | None, unit: str) -> str:
    """``0.17 spreads``; nothing where nothing was measured."""
    return "" if size is None else f"{size:.3g} {unit}"


def _certify(probes: Sequence[str], as_json: bool) -> int:
    from scantling.audits.certify import table, trial
    from scantling.audits.examine import named as probes_named

    chosen = probes_named(probes or None)
    plants = [(probe, plant) for probe in chosen for plant in probe.plants]
    trials: list[Trial] = []
    with _progress(len(plants)) as step:
        for probe, plant in plants:
            step(f"{probe.name}: {plant.what}")
            trials.append(trial(probe, plant))
    rows, failed = table(trials), [t for t in trials if not t.passed]
    if as_json:
        show.emit({"rows": [vars(row) for row in rows], "failed": [_missed(t) for t in failed]})
        return 1 if failed else 0
    columns = ("probe", "faults planted", "caught", "near-faults planted", "let pass")
    show.table(columns, [(r.probe, r.planted, r.caught, r.near, r.let_pass) for r in rows])
    for t in failed:
        show.say(f"{t.probe}: {t.plant.what}: {'missed' if t.plant.faulty else 'called ' + _verdicts(t)}")
    faults, near = sum(r.planted for r in rows), sum(r.near for r in rows)
    show.say(
        f"{len(rows)} probes: {sum(r.caught for r in rows)} of {faults} faults caught, "
        f"{sum(r.let_pass for r in rows)} of {near} near-faults let pass"
    )
    return 1 if failed else 0


def _missed(t: Trial) -> dict[str, Any]:
    return {"probe": t.probe, "plant": t.plant.what, "faulty": t.plant.faulty, "verdicts": _verdicts(t)}


def _verdicts(t: Trial) -> str:
    return ", ".join(dict.fromkeys(str(f.verdict) for f in t.findings))


def _progress(steps: int) -> AbstractContextManager[Callable[[str], None]]:
    """What says which step runs: a bar on a terminal, plain lines elsewhere."""
    from contextlib import contextmanager

    @contextmanager
    def lines() -> Any:
        done = 0

        def step(what: str) -> None:
            nonlocal done
            done += 1
            click.echo(f"{done}/{steps} {what}", err=True)

        yield step

    @contextmanager
    def bar() -> Any:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as shown:
            task = shown.add_task("", total=steps)

            def step(what: str) -> None:
                shown.update(task, advance=1, description=show.short(what))

            yield step

    return bar() if sys.stderr.isatty() else lines()
