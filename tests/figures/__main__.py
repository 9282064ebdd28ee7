"""``python -m tests.figures`` prints docs/figures.md, ``--write`` rewrites it."""

from __future__ import annotations

import sys

from tests.figures.page import PATH, page

if "--write" in sys.argv[1:]:
    PATH.write_text(page())
else:
    print(page(), end="")
