"""Build a tokenizer of the `tokenizers` library from a SentencePiece model (arXiv:1808.06226), a `.model` file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scantling.errors import ScantlingInputError, need
from scantling.text import gguf_vocab
from scantling.text.gguf_vocab import BYTE, MAX_TOKENS

MAX_BYTES = 256 * 2**20
FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""Names that such a file has in a model folder."""
_UNIGRAM, _BPE = 1, 2


class Pieces:
    """A SentencePiece model.

    Attributes:
        library: the `tokenizers.Tokenizer` that encodes as it does: to the same ids, but for BPE where a piece made in
            two ways overlaps itself, as in runs of one character.
        names: the tokens that mean something, by role: bos, eos, pad.
    """

    def __init__(self, path: Path, add_bos: bool | None = None, add_eos: bool | None = None) -> None:
        """Read a file.

        Args:
            add_bos, add_eos: whether they stand around a text. None is what llama.cpp takes each kind for: BPE begins
                with BOS, and unigram ends with EOS (`src/llama-vocab.cpp`), where the model has them.

        Raises:
            ScantlingInputError: no SentencePiece model, or one of a kind that cannot be built.
            MissingExtra: the `sentencepiece` library is not installed.
        """
        self._path = path
        proto = _read(path)
        kind = proto.trainer_spec.model_type
        if kind not in (_UNIGRAM, _BPE):
            raise ScantlingInputError(f"{path}: a SentencePiece model of words or characters; unigram or BPE is needed")
        if proto.trainer_spec.treat_whitespace_as_suffix or not proto.normalizer_spec.escape_whitespaces:
            raise ScantlingInputError(f"{path}: spaces are marked in another way than before each word")
        tokens, types = [piece.piece for piece in proto.pieces], [piece.type for piece in proto.pieces]
        if len(set(tokens)) < len(tokens):
            raise ScantlingInputError(f"{path}: a piece comes twice")
        scores = [piece.score for piece in proto.pieces]
        make = self._unigram if kind == _UNIGRAM else self._bpe
        self.library = make(proto, tokens, scores, types)
        self._set_normalizer(proto.normalizer_spec)
        spec = proto.trainer_spec
        ids = {"bos": spec.bos_id, "eos": spec.eos_id, "pad": spec.pad_id}
        self.names = {role: tokens[token_id] for role, token_id in ids.items() if 0 <= token_id < len(tokens)}
        usual = {"bos": kind == _BPE, "eos": kind == _UNIGRAM}
        asked = {"bos": add_bos, "eos": add_eos}
        self._frame({role: role in self.names and usual[role] if on is None else on for role, on in asked.items()})

    def _unigram(self, proto: Any, tokens: list[str], scores: list[float], types: list[int]) -> Any:
        tokenizers = need("tokenizers", "read text")
        unknown = proto.trainer_spec.unk_id
        model = tokenizers.models.Unigram(list(zip(tokens, scores, strict=True)), unknown, BYTE in types)
        library = tokenizers.Tokenizer(model)
        restore = [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
        if proto.normalizer_spec.add_dummy_prefix:
            restore.append(tokenizers.decoders.Strip(" ", 1, 0))
        library.decoder = tokenizers.decoders.Sequence(restore)
        gguf_vocab.add_marked(library, tokens, types)
        return library

    def _bpe(self, proto: Any, tokens: list[str], scores: list[float], types: list[int]) -> Any:
        return gguf_vocab.build(
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.scores": scores,
                "tokenizer.ggml.token_type": types,
                "tokenizer.ggml.add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
            }
        )

    def _set_normalizer(self, spec: Any) -> None:
        made = need("tokenizers.normalizers", "read text")
        regex = need("tokenizers", "read text").Regex
        steps = [made.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
        if spec.remove_extra_whitespaces:
            steps += [made.Strip(), made.Replace(regex(" {2,}"), " ")]
        if spec.add_dummy_prefix:
            steps.append(made.Prepend("▁"))
        self.library.normalizer = made.Sequence([*steps, made.Replace(" ", "▁")])

    def _frame(self, added: Mapping[str, bool]) -> None:
        """Let BOS and EOS stand around each text."""
        for role, wanted in added.items():
            if wanted and role not in self.names:
                raise ScantlingInputError(f"{self._path}: {role.upper()} is to be added, and the model has none")
        before, after = ([self.names[role]] if added[role] else [] for role in ("bos", "eos"))
        if not before and not after:
            return
        processors = need("tokenizers.processors", "read text")
        marks = [(token, self.library.token_to_id(token)) for token in (*before, *after)]
        self.library.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=marks
        )


def _read(path: Path) -> Any:
    need("sentencepiece", f"read {path}")
    messages: Any = need("sentencepiece.sentencepiece_model_pb2", f"read {path}")

    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ScantlingInputError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise ScantlingInputError(f"{path} is larger than the {MAX_BYTES:,} bytes allowed")
    proto = messages.ModelProto()
    try:
        proto.ParseFromString(data)
    except Exception as error:  # protobuf's own types, which differ between its releases
        raise ScantlingInputError(f"{path}: is no SentencePiece model: {error}") from None
    if not 0 < len(proto.pieces) <= MAX_TOKENS or not proto.HasField("trainer_spec"):
        raise ScantlingInputError(
            f"{path}: is no SentencePiece model: {len(proto.pieces)} pieces, or nothing about them"
        )
    if not 0 <= proto.trainer_spec.unk_id < len(proto.pieces):
        raise ScantlingInputError(f"{path}: no piece stands for what is unknown")
    return proto
