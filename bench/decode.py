"""Decoding, one text at a time: packed weights as they are shipped and torch, beside every peer that is installed.

usage: python bench/decode.py [--rounds 5] [--tokens 64] [--prompt 128] [--dtypes bfloat16,float32] [--large]

`--large` races a card of 1.2 B parameters in Q4_0, larger than any cache, with initial weights: llama.cpp and the
compiled pass read the same file.
"""

from __future__ import annotations

from pathlib import Path

from race import contested, decoding, options, ours, scratch, subject, written

from scantling.benches.plan import Contender, Load

LARGE = "llama-3.2-1b"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--large", action="store_true")
    given = parser.parse_args()
    load = Load(1, given.prompt, given.tokens)
    if not given.large:
        contested("decode", subject(), [load], given, decoding)
        return
    given.dtypes = "bfloat16" if given.dtypes == parser.get_default("dtypes") else given.dtypes
    entrants = [one for one in ours(given.dtypes) if one != Contender("torch", "float32")]
    with scratch() as folder:
        file = written(LARGE, "q4_0", Path(folder))
        contested(f"decode, {LARGE} in q4_0", subject(file), [load], given, decoding, entrants)


if __name__ == "__main__":
    main()
