"""Options of `scantling lens`: what is read, what is changed, what is written."""

from __future__ import annotations

from pathlib import Path

import click

from scantling.cli import drawing

VIEWS = {
    "next": "what comes next, under each --temperature",
    "logit-lens": "what the head would say after each layer",
    "attribution": "what each head and MLP adds to a logit",
    "attention": "what each head reads; with --layer and --head one map",
    "cross-attention": "the same of the source",
    "residual": "the stream as a sum of what wrote it",
    "induction": "heads that copy, on repeated random tokens",
    "patch": "which layer and token carries the answer",
    "ablate": "the answer without some heads or sublayers",
    "steer": "the answer with a direction added",
    "points": "everything inside that has a name",
}
SUMMARY = ("next", "logit-lens", "attribution", "attention")
WITHOUT_TEXT = ("induction", "points")
OF_VIEWS = {
    "temperature": ("next",),
    "times": ("patch",),
    "kind": ("patch",),
    "metric": ("patch", "ablate", "steer"),
    "mean": ("ablate",),
    "at": ("steer",),
    "strength": ("steer",),
    "new": ("steer",),
    "keep": ("steer",),
    "length": ("induction",),
    "rows": ("induction",),
    "seed": ("induction", "patch"),
}
"""Options that change only these views, and bring none along."""
OF_A_STACK = ("attention", "residual", "patch")
_FILE = click.Path(path_type=Path, dir_okay=False)

reading_options = drawing.grouped(
    "asked",
    {
        "show": click.option("--show", multiple=True, metavar="VIEW", help="May be repeated; the views are below."),
        "ids": click.option("--ids", is_flag=True, help="PROMPT is token ids, as in '12 7 3'."),
        "chat": click.option("--chat", is_flag=True, help="Put PROMPT into the model's chat template."),
        "target": click.option("--target", metavar="TEXT", help="Of an encoder-decoder, how its answer begins."),
        "stack": click.option("--stack", help="Of an encoder-decoder, which one. [default: decoder]"),
        "position": click.option(
            "--position", type=int, metavar="N", help="The token that is looked at. [default: a mask, else the last]"
        ),
        "token": click.option(
            "--token", metavar="TEXT", help="The answer: one token, or #id. [default: the likeliest]"
        ),
        "against": click.option(
            "--against", metavar="TEXT", help="What it is compared with. [default: the next likeliest]"
        ),
        "top": click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="Rows shown."),
        "temperature": click.option(
            "--temperature", type=float, multiple=True, default=(1.0,), show_default=True, help="May be repeated."
        ),
        "layer": click.option("--layer", type=int, multiple=True, help="Of attention; may be repeated. [default: all]"),
        "head": click.option("--head", type=int, help="Of attention."),
        "every": click.option("--every-token", "every", is_flag=True, help="Of the logit lens: a grid of all tokens."),
        "tuned": click.option("--tuned", type=_FILE, metavar="FILE", help="Affine maps of a tuned lens (safetensors)."),
    },
)
change_options = drawing.grouped(
    "changed",
    {
        "corrupted": click.option("--corrupted", metavar="TEXT", help="patch: a text of as many tokens that misleads."),
        "noise": click.option("--noise", metavar="N-M", help="patch: instead, noise on embeddings of these tokens."),
        "times": click.option(
            "--noise-size", "times", type=float, default=3.0, show_default=True, help="In deviations of embeddings."
        ),
        "kind": click.option(
            "--patch", "kind", default="stream", show_default=True, help="stream, attn, cross, mlp or heads."
        ),
        "metric": click.option(
            "--metric",
            type=click.Choice(["difference", "probability"]),
            default="difference",
            show_default=True,
            help="Of --token: its logit less that of --against, or its probability.",
        ),
        "ablate": click.option(
            "--ablate",
            multiple=True,
            metavar="WHAT",
            help="18.6 is a head, 18.mlp a sublayer, 18.mlp:hidden[5] a neuron.",
        ),
        "mean": click.option("--mean", is_flag=True, help="ablate: put the mean over this text instead of 0."),
        "direction": click.option("--direction", type=_FILE, metavar="FILE", help="steer: one (safetensors)."),
        "toward": click.option("--toward", multiple=True, metavar="TEXT", help="steer: make one from these texts ..."),
        "away": click.option("--away", multiple=True, metavar="TEXT", help="... less these, one for each."),
        "at": click.option("--at", metavar="POINT", help="steer: where, or a layer. [default: after the middle layer]"),
        "strength": click.option("--strength", type=float, default=1.0, show_default=True, help="steer: times it."),
        "new": click.option(
            "--max-new-tokens", "new", type=click.IntRange(min=0), default=16, show_default=True, help="steer: written."
        ),
        "keep": click.option("--save-direction", "keep", type=_FILE, metavar="FILE", help="steer: write it down."),
        "length": click.option(
            "--length", type=click.IntRange(min=2), default=50, show_default=True, help="induction: tokens of a half."
        ),
        "rows": click.option(
            "--rows", type=click.IntRange(min=1), default=4, show_default=True, help="induction: texts."
        ),
        "seed": click.option("--seed", type=int, default=0, show_default=True, help="Of random tokens and noise."),
    },
)
output_options = drawing.grouped(
    "outputs",
    {
        "png": click.option("--png", type=_FILE, metavar="FILE", help="Also draw the charts."),
        "svg": click.option("--svg", type=_FILE, metavar="FILE", help="The same as SVG."),
        "html": click.option("--html", type=_FILE, metavar="FILE", help="Also write one page that holds everything."),
        "arrays": click.option("--arrays", type=_FILE, metavar="FILE", help="Also write the numbers (safetensors)."),
        "capture": click.option(
            "--capture", multiple=True, metavar="POINT", help="With --arrays: what passes it, too; * stands for any."
        ),
    },
)
