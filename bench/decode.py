"""Decoding, one text at a time: packed weights as they are shipped and torch, beside every peer that is installed.

usage: python bench/decode.py [--rounds 5] [--tokens 64] [--prompt 128] [--dtypes bfloat16,float32] [--large [CARD]]

`--large` races a card in Q4_0 with initial weights, by default `large.yaml` of 1.1 B parameters, beyond any cache:
llama.cpp and the compiled pass read the same file.
"""

from __future__ import annotations

from pathlib import Path

from race import contested, decoding, options, ours, scratch, subject, written

from scantling.benches.plan import Contender, Load

LARGE = str(Path(__file__).parent / "large.yaml")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--large", nargs="?", const=LARGE, metavar="CARD")
    given = parser.parse_args()
    load = Load(1, given.prompt, given.tokens)
    if not given.large:
        contested("decode", subject(), [load], given, decoding)
        return
    given.dtypes = "bfloat16" if given.dtypes == parser.get_default("dtypes") else given.dtypes
    entrants = [one for one in ours(given.dtypes) if one != Contender("torch", "float32")]
    with scratch() as folder:
        file = written(given.large, "q4_0", Path(folder))
        contested(f"decode, {given.large} in q4_0", subject(file), [load], given, decoding, entrants)


if __name__ == "__main__":
    main()
