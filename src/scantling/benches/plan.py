"""What is measured: who runs, and what each is given to do."""

from __future__ import annotations

import random
from dataclasses import dataclass

ENGINES = ("torch", "packed", "packed-int8", "compile")
UNASKED = ENGINES[:3]
"""Those that run where none is named: compiling takes a minute for each width."""
PEERS = ("transformers", "llama.cpp", "llama-server", "openvino")
"""llama.cpp from a wheel, and llama-server, its program, as it was built for this machine."""
CACHES = ("full", "ring", "int8", "ring-int8", "paged", "paged-int8")
"""Every position; rings of the windows; numbers in 8 bits; blocks that the batching engine hands out."""


@dataclass(frozen=True)
class Contender:
    """Who runs.

    Attributes:
        engine: of `ENGINES` or `PEERS`.
        dtype: of the weights; ``stored`` where they stay as the file has them.
    """

    engine: str
    dtype: str

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.engine} {self.dtype}"

    @property
    def is_peer(self) -> bool:
        """Whether it is somebody else's program."""
        return self.engine in PEERS

    @property
    def caches(self) -> tuple[str, ...]:
        """Kinds of cache that it has."""
        return CACHES if self.engine == "torch" else ("full",)


@dataclass(frozen=True)
class Load:
    """What a contender does in one run.

    Attributes:
        batch: rows side by side.
        prompt: tokens of each row that are read.
        tokens: steps after the first new token; of an encoder 0.
        cache: of `CACHES`.
    """

    batch: int
    prompt: int
    tokens: int
    cache: str = "full"

    @property
    def kind(self) -> str:
        """The same without its numbers: full, ring or paged."""
        return self.cache.partition("-")[0] if self.cache != "int8" else "full"

    @property
    def numbers(self) -> str:
        """plain or int8."""
        return "int8" if self.cache.endswith("int8") else "plain"

    @property
    def name(self) -> str:
        """As progress shows it."""
        return f"batch {self.batch}, prompt {self.prompt}, {self.tokens} tokens, {self.cache} cache"


def prompts(load: Load, vocab_size: int) -> list[list[int]]:
    """Rows of random ids, the same for every contender; no row begins as another does."""
    draw = random.Random(load.batch * 1_000_003 + load.prompt)
    low = min(3, vocab_size - 1)
    return [[draw.randrange(low, vocab_size) for _ in range(load.prompt)] for _ in range(load.batch)]
