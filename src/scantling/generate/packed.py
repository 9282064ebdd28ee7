"""Weights for the compiled pass, packed as they are stored; nothing here needs PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scantling.checkpoint.families.gguf import architecture
from scantling.checkpoint.gguf import GGUFHeader, read_gguf
from scantling.errors import ScantlingInputError
from scantling.native.decoder import Decoder
from scantling.native.library import missing
from scantling.native.packed import Packed
from scantling.native.program import outline
from scantling.native.texts import Texts
from scantling.native.weights import OfFolder, OfGGUF, OfNet, Weights

if TYPE_CHECKING:
    from scantling.checkpoint.load import DescribedFolder
    from scantling.generate.packed_session import PackedSession
    from scantling.model import Model

ACTIVATIONS = ("exact", "int8")


@dataclass(frozen=True)
class PackedWeights:
    """What a model decodes with instead of its net.

    Attributes:
        weights: in tiles.
        activations: ``exact``, in float32; or ``int8``, rounded where they meet 8- and 4-bit weights.
    """

    weights: Packed
    activations: str = "exact"

    def texts(self, slots: int, capacity: int) -> Texts:
        """So many empty texts, with a cache for so many positions of each."""
        quantised = self.activations == "int8"
        return Texts(Decoder(self.weights, slots=slots, capacity=capacity, quantised=quantised))

    def session(self, model: Model, batch: int, capacity: int) -> PackedSession:
        """The same as a session of PyTorch is used, of so many rows."""
        from scantling.generate.packed_session import PackedSession

        return PackedSession(model, self, batch, capacity)


def why_not(model: Model) -> str | None:
    """Why the compiled pass cannot decode with this model; None where it can."""
    found = outline(model.parts)
    if isinstance(found, str):
        return f"the compiled pass does not know {model.card.name}: {found}"
    if model.is_built and model.device.type != "cpu":
        return f"the compiled pass runs on the CPU, and the weights are on {model.device}"
    return missing()


def pack(model: Model, width: str, activations: str, weights: Weights | None = None) -> PackedWeights:
    """See `Model.pack`.

    Args:
        weights: where they come from, if not from the file or the net that the model has.
    """
    if activations not in ACTIVATIONS:
        raise ScantlingInputError(f"activations are {activations!r}; use {' or '.join(ACTIVATIONS)}")
    if (why := why_not(model)) is not None:
        raise ScantlingInputError(why)
    found = outline(model.parts)
    assert not isinstance(found, str)
    packed = Packed(found, weights or _weights(model, width))
    if activations == "int8" and not packed.library.sc_integer_dot():
        raise ScantlingInputError("8-bit activations need a processor with AVX-512 VNNI; the exact pass runs here")
    return PackedWeights(packed, activations)


def _weights(model: Model, width: str) -> Weights:
    if model.file is None:
        return OfNet(model.net.state_dict(), width)
    return of_gguf(model, read_gguf(model.file), width)


def of_folder(file: DescribedFolder) -> OfFolder:
    """The weights of a model in the safetensors of these headers."""
    return OfFolder(file)


def of_gguf(model: Model, header: GGUFHeader, width: str = "stored") -> OfGGUF:
    """The weights of a model in the GGUF file of this header."""
    rows = tuple(architecture(header.metadata, str(header.path)).rows(model.card))
    return OfGGUF(header, rows, model.parts.named_weights, width)
