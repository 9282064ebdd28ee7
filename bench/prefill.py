"""Reading a prompt: tokens per second, beside every peer that is installed.

usage: python bench/prefill.py [--rounds 5] [--prompt 512] [--dtypes bfloat16,float32]
"""

from __future__ import annotations

from race import contested, options, reading, subject

from scantling.benches.plan import Load


def main() -> None:
    parser = options(__doc__, tokens=1)
    parser.add_argument("--prompt", default="512", help="lengths, with commas between")
    given = parser.parse_args()
    loads = [Load(1, int(length), given.tokens) for length in given.prompt.split(",")]
    contested("prefill", subject(), loads, given, reading)


if __name__ == "__main__":
    main()
