"""The page of findings, docs/inspect.md: what `scantling inspect` looks at, and every kind of finding.

``python -m tests.inspect_page --write`` rewrites it from the table in the code; a test fails where it is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from scantling.checkpoint.header import HEADER_LIMIT
from scantling.checkpoint.inspect.codes import CODES, SEVERITIES
from scantling.checkpoint.inspect.layout import CLEAR
from scantling.checkpoint.inspect.sample import FAR_ROWS, ROWS, WHOLE
from scantling.checkpoint.remote import FIRST, TIMEOUT

PATH = Path(__file__).parents[1] / "docs" / "inspect.md"

HEADER = """# What `scantling inspect` finds

`scantling inspect PATH` reads the headers of a checkpoint and never its weights, but for a few rows where headers
cannot tell. PATH is a folder, a `.safetensors` or `.gguf` file, an index, a `config.json`, an http address of one of
them, or a hub id. This page is made by `python -m tests.inspect_page --write` (or `make docs`) from the table in
`src/scantling/checkpoint/inspect/codes.py`; a test fails where it is out of date.

Two descriptions of the model stand side by side.

- **By the tensors**: names and shapes alone. The names are looked up in the tables that load and save every family;
  of equal fits all families are listed. A fact that leaves no tensor is `unknown`, never guessed: the number of heads
  is known only where a tensor has a number for each head or channel (QK-norm, sinks, biases per head, latent
  attention), and bases, epsilons, windows and activations never are. Where one family uses the same names for
  different models, what they do not share is unknown, too.
- **By the config** (or the metadata of a GGUF file): the card that `config.json` describes, put through the same
  reading as if it were a file.

Where both say something and differ, there is a finding with its likely cause. `--card` prints the card that rebuilds
the model: the config's, with the sizes that the tensors show in place of those that contradict them, and only if its
model then has exactly the tensors of the file. Training, cache, batch and lengths are `unknown` in it, because no
checkpoint tells; rates of dropout are the config's, and 0 where a GGUF file has none. Without a config there is no
complete card: what is known is printed with `unknown` for the rest, and the exit status is 1.

Rows are read in two cases. Two tables of up to {whole} MiB each are compared whole, larger ones in {rows} rows ({far}
of a file on another machine). And the norms of rows of queries and keys show how the pairs that RoPE turns lie in a
trained model: rows half a head apart correlate by more than {clear} where pairs are halves, by less than -{clear}
where they are neighbours; between the two nothing is said.

Of a file behind an address the first {first} KiB are asked for, and then what its header needs; a server is given
{timeout:g} seconds. Headers of safetensors may have {header} MiB, with `--big` the format's 100 MB. A file that is
malformed, a pickle, or a path that leads out of the folder is refused in one sentence with exit status 2; nothing is
executed.

Exit status 1 means that a finding is an **error**: loading would be refused, or give another model. A **warning** may
be another model than was meant; **info** is worth knowing.

| finding | severity | what was found | usual cause |
|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    text = HEADER.format(
        whole=WHOLE // 2**20,
        rows=ROWS,
        far=FAR_ROWS,
        clear=CLEAR,
        first=FIRST // 1024,
        timeout=TIMEOUT,
        header=HEADER_LIMIT // 2**20,
    )
    order = sorted(CODES.items(), key=lambda item: SEVERITIES.index(item[1].severity))
    return text + "".join(f"| `{name}` | {code.severity} | {code.means} | {code.cause} |\n" for name, code in order)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PATH.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
