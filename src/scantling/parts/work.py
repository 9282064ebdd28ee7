"""What a model is asked to do in one pass: rows, lengths, training or not, and what the parts hand each other."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scantling.errors import ScantlingInputError
from scantling.parts.dims import ONE, Dim, Dims
from scantling.parts.saved import POLICIES, Value
from scantling.units import DTYPE_BYTES


@dataclass(frozen=True)
class Workload:
    """What a model is asked to do in one pass.

    Attributes:
        batch: rows (B).
        tokens: new positions per row (T).
        past: positions already in the cache (P); keys are S = P + T.
        source: positions of an encoder-decoder's source; default as many as its keys.
        training: no cache, and a loss over every position instead of next-token probabilities.
        kernel: ``fused`` never holds the T x S scores; ``reference`` is plain matmul and softmax.
        lead: leading axes of the activations where they are not (B, T): the rows sent to experts.
        last_only: the head reads the last position only, as a prefill does.
        unrolled: rows for every block, instead of one block with the number of its repeats.
        prefix_lengths: of each row, in layers with a prefix; () where no row has one.
        dtype: of weights and activations, which decides what a training pass keeps.
        autocast: what torch.autocast runs products in, where it is not `dtype`.
        recompute: what a training pass computes again in the backward: ``none``, ``selective``, ``block``.
        packed: documents share the rows, and each row has its own.
        accelerator: norms, gates, attention and dropout keep what one kernel each needs, as libraries for accelerators
            have them; without it, what torch's operators keep on CPU.
        x: what the part reads, known inside a training pass.
        beside: what it reads besides: the encoder's output, or where each expert's rows end.
        of_source: the tokens are an encoder-decoder's source, which the encoder reads.
    """

    batch: int = 1
    tokens: int = 1
    past: int = 0
    source: int | None = None
    training: bool = False
    kernel: str = "fused"
    lead: Dims | None = None
    last_only: bool = False
    unrolled: bool = False
    prefix_lengths: tuple[int, ...] = ()
    dtype: str = "float32"
    autocast: str | None = None
    recompute: str = "none"
    packed: bool = False
    accelerator: bool = False
    x: Value | None = None
    beside: Value | None = None
    of_source: bool = False

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("tokens", 1), ("past", 0), ("source", 1)):
            value = getattr(self, name)
            if name == "source" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ScantlingInputError(f"{name} is {value!r}; a whole number of at least {least} is needed")
        if self.kernel not in ("fused", "reference"):
            raise ScantlingInputError(f"kernel is {self.kernel!r}; use fused or reference")
        if self.recompute not in POLICIES:
            raise ScantlingInputError(f"recompute is {self.recompute!r}; use one of {', '.join(POLICIES)}")
        if self.training and self.past:
            raise ScantlingInputError("a training pass has no cache: past must be 0")
        if self.prefix_lengths and (len(self.prefix_lengths) != self.batch or min(self.prefix_lengths) < 0):
            raise ScantlingInputError(
                f"prefix_lengths are {list(self.prefix_lengths)}; a length of at least 0 for each of {self.batch} rows"
                " is needed"
            )

    @property
    def keys(self) -> int:
        """Key positions per row: S = P + T."""
        return self.past + self.tokens

    @property
    def sources(self) -> int:
        """Positions of the source."""
        return self.keys if self.source is None else self.source

    @property
    def B(self) -> Dim:
        """Rows."""
        return Dim("B", self.batch)

    @property
    def T(self) -> Dim:
        """New positions, of the source where that is what is read."""
        return Dim("T_src" if self.of_source else "T", self.tokens)

    @property
    def S(self) -> Dim:
        """Key positions."""
        return self.T if self.of_source else Dim("S", self.keys)

    @property
    def T_src(self) -> Dim:
        """Positions of the source."""
        return Dim("T_src", self.sources)

    @property
    def rows(self) -> Dims:
        """Leading axes of an activation."""
        return (self.B, self.T) if self.lead is None else self.lead

    def on(self, x: Value) -> Workload:
        """The same for a part that reads `x`."""
        return replace(self, x=x) if self.training else self

    def read(self, numel: int, dtype: str | None = None) -> Value:
        """What the part reads; where nobody says, a tensor of its own."""
        return self.x or Value("x", numel, dtype)

    def keep(self, *values: Value) -> tuple[Value, ...]:
        """The values in training, nothing in inference."""
        return values if self.training else ()

    def dropped(self, x: Value, numel: int) -> Value:
        """What dropout of `x` keeps: one byte for each number (arXiv:2205.05198, section 4.1), or, as torch on CPU
        multiplies by zeros and 1 / (1 - p), a factor in the dtype of what it drops."""
        return Value("factors of dropout", numel, "bool" if self.accelerator else x.dtype)

    def cast(self, x: Value, numel: int, dtype: str | None) -> Value:
        """`x`, of which `numel` elements are meant, in `dtype`: itself where that is what it has."""
        return x if (x.dtype or self.dtype) == (dtype or self.dtype) else Value(f"{x.name} as {dtype}", numel, dtype)

    def factor(self, x: Value, numel: int) -> Value:
        """`x` as a product reads it: autocast casts it each time."""
        return x if self.autocast is None else self.cast(x, numel, self.autocast)

    def joint(self, *values: Value) -> str | None:
        """The dtype of a sum: that of the widest, where it is not the activations' own."""
        widest = max((v.dtype or self.dtype for v in values), key=DTYPE_BYTES.__getitem__)
        return None if widest == self.dtype else widest

    @property
    def places(self) -> Dim:
        """Rows that have positions of their own: one for all, unless they are packed."""
        return self.B if self.packed else ONE
