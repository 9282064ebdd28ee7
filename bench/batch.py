"""Decoding several texts side by side: new tokens per second of all of them, beside every peer that is installed.

usage: python bench/batch.py [--rounds 5] [--tokens 64] [--prompt 128] [--batch 8,32] [--dtypes bfloat16,float32]
"""

from __future__ import annotations

from race import contested, decoding, options, subject

from scantling.benches.plan import Load


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--batch", default="8,32")
    given = parser.parse_args()
    loads = [Load(int(rows), given.prompt, given.tokens) for rows in given.batch.split(",")]
    contested("decode side by side", subject(), loads, given, decoding)


if __name__ == "__main__":
    main()
