"""The tokenizer of a model: text to ids and back, from a model folder or from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scantling.errors import ScantlingInputError, need
from scantling.text import folder as files
from scantling.text import gguf_vocab, gguf_vocab_write, pieces, written
from scantling.text.marks import Marks, marks_of_folder, marks_of_gguf, marks_of_names
from scantling.text.stream import TokenStream, stage_makers

__all__ = ["TokenStream", "Tokenizer"]


_OF_TYPES = "tokenizer.ggml.token_type_count"
"""A key that is not of the tokenizer, but of the model's table of token types."""


class Tokenizer:
    """Text to ids and back, around the `tokenizers` library; made by `from_folder`, `from_gguf` or `from_library`.

    Ids are plain ints. The object holds no state of a conversation and may be shared between threads.
    """

    def __init__(self, library: Any, marks: Marks, source: Mapping[str, object] | None = None) -> None:
        self._library = library
        self._marks = marks
        self._source = source
        added = library.get_added_tokens_decoder().values()
        self._special = frozenset(token.content for token in added if token.special)
        self._stages = stage_makers(library.decoder, frozenset(token.content for token in added))
        self.vocab_size: int = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """The highest id plus one: model rows from here on mean nothing and must not be sampled."""
        empty = library.encode("", add_special_tokens=True).ids
        self._processor_adds_bos = marks.bos_id is not None and empty[:1] == [marks.bos_id]
        self._adds_bos = self._processor_adds_bos if marks.add_bos is None else marks.add_bos

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and the files beside it; where there is none, a SentencePiece model (`pieces.FILES`).

        Read are tokenizer.json (at most 256 MiB; truncation and padding in it are switched off), tokenizer_config.json,
        special_tokens_map.json, generation_config.json (at most 16 MiB each) and chat_template.jinja (at most 256 KiB).
        EOS is the tokenizer's own token together with all of generation_config.json. BOS is added where
        tokenizer_config.json says `add_bos_token`, and without that where the post-processor of tokenizer.json does.

        Raises:
            ScantlingInputError: a file is missing, too large, malformed, or names a token that does not exist.
            MissingExtra: the `tokenizers` library is not installed.
        """
        root = Path(folder)
        if (model := files.sentencepiece_of(root)) is not None:
            return cls._from_pieces(model, root)
        library = files.read_library(root)
        return cls(library, marks_of_folder(root, library))

    @classmethod
    def from_sentencepiece(cls, path: str | Path) -> Tokenizer:
        """Read a SentencePiece model, a `.model` file by itself; `pieces.Pieces` says what stands around a text.

        Raises:
            ScantlingInputError: no SentencePiece model, or one of a kind that cannot be built.
            MissingExtra: the `sentencepiece` library is not installed.
        """
        return cls._from_pieces(Path(path), None)

    @classmethod
    def _from_pieces(cls, model: Path, root: Path | None) -> Tokenizer:
        """A SentencePiece model with what the files of a folder say beside it."""
        config = {} if root is None else files.read_json(root / "tokenizer_config.json")
        adds = (files.optional_flag(config, f"add_{mark}_token") for mark in ("bos", "eos"))
        found = files.guarded(lambda: pieces.Pieces(model, *adds), f"{model} is no tokenizer")
        return cls.from_library(found.library, found.names, None if root is None else files.chat_template(root, config))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """Build the tokenizer from the `tokenizer.*` keys of a GGUF file.

        Supported: `tokenizer.ggml.model` `gpt2` with pre `smollm`, `gpt-2`, `default`, `llama-bpe` or `qwen2`, and
        `llama` (SentencePiece BPE) and `bert` (WordPiece, whose marks are the post-processor's). EOS is the union of
        eos, eot and eom ids.

        Raises:
            ScantlingInputError: a key is missing or malformed, or the kind of vocabulary is not supported.
            MissingExtra: the `tokenizers` library is not installed.
        """
        library = gguf_vocab.build(metadata)
        source = {key: value for key, value in metadata.items() if key.startswith("tokenizer.") and key != _OF_TYPES}
        return cls(library, marks_of_gguf(metadata), source)

    @classmethod
    def from_library(cls, library: Any, names: Mapping[str, str], chat_template: str | None = None) -> Tokenizer:
        """Wrap a `tokenizers.Tokenizer` that was just made.

        Args:
            names: the tokens that mean something, by role: bos, eos, mask, pad; what is added to a text is the
                library's post-processor's.

        Raises:
            ScantlingInputError: the vocabulary does not have such a token.
        """
        return cls(library, marks_of_names(library, names, chat_template))

    def gguf_metadata(self, rows: int) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The `tokenizer.*` keys of a GGUF file with `rows` tokens, and what a user should know.

        A vocabulary that came from a GGUF file is given back as it was.

        Raises:
            ScantlingInputError: GGUF has no name for this kind of vocabulary, or it does not fit the rows.
        """
        source, ends = self._source, self._marks.eos_ids
        if source is not None:
            tokens = source["tokenizer.ggml.tokens"]
            assert isinstance(tokens, Sequence)
            if len(tokens) != rows:
                raise ScantlingInputError(f"the vocabulary has {len(tokens)} tokens and the model has {rows} rows")
            return dict(source), ()
        found = gguf_vocab_write.vocabulary(
            self._library,
            rows,
            bos=self.bos_id,
            eos=ends,
            add_bos=self._adds_bos,
            template=self.chat_template,
            mask=self.mask_id,
        )
        left = [self.token(token_id) for token_id in ends[3:]]
        return found, (f"tokens that end a text beyond the first three are left out: {left}",) if left else ()

    @property
    def bos_id(self) -> int | None:
        """The id that starts a text, or None."""
        return self._marks.bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a generation; empty where no file names one."""
        return frozenset(self._marks.eos_ids)

    @property
    def mask_id(self) -> int | None:
        """The id that stands for a missing word, or None."""
        return self._marks.mask_id

    @property
    def pad_id(self) -> int | None:
        """The id that fills rows up, or None."""
        return self._marks.pad_id

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a generation, in order: the tokenizer's own EOS first."""
        return self._marks.eos_ids

    @property
    def bos_token(self) -> str:
        """The text of BOS, for a chat template; empty where there is none."""
        return "" if self.bos_id is None else self.token(self.bos_id)

    @property
    def eos_token(self) -> str:
        """The text of the tokenizer's own EOS (the first where there are several); empty where there is none."""
        return self.token(self._marks.eos_ids[0]) if self._marks.eos_ids else ""

    @property
    def chat_template(self) -> str | None:
        """The source of the default chat template, or None; render it with `scantling.text.template.render`."""
        return self._marks.chat_template

    def id_of(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""
        found = self._library.token_to_id(token)
        return None if found is None else int(found)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of a text.

        Text that spells a special token, such as `<|im_end|>`, becomes that token, as in the library: whoever inserts
        the words of strangers must look for them first. Bytes that the vocabulary has no token for are left out, again
        as in the library: a byte-level vocabulary may lack a few control characters and unassigned planes.

        Args:
            text: any text, also the empty one.
            add_special: add what the tokenizer adds, such as BOS or [CLS] and [SEP]; BOS is not added to a text that
                starts with it.

        Raises:
            ScantlingInputError: not a string, or one with a lone surrogate, which no encoding can carry.
        """
        if not isinstance(text, str):
            raise ScantlingInputError(f"text to encode must be a string, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ScantlingInputError(
                f"text to encode has a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}"
            ) from None
        ids: list[int] = files.guarded(
            lambda: self._library.encode(text, add_special_tokens=add_special).ids, "the tokenizer refuses this text"
        )
        return self._begun(ids) if add_special else ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, as `encode` gives them; the library reads them side by side on several threads.

        Raises:
            ScantlingInputError: as for `encode`.
        """
        try:
            found = self._library.encode_batch_fast(list(texts), add_special_tokens=True)
        except Exception:
            # The library does not say which text it is; one by one, somebody does.
            return [self.encode(text) for text in texts]
        return [self._begun(one.ids) for one in found]

    def _begun(self, ids: list[int]) -> list[int]:
        """With the one start token that belongs there."""
        if self.bos_id is None:
            return ids
        if self._processor_adds_bos:
            doubled = ids[1:2] == [self.bos_id]
            return ids[1:] if doubled or not self._adds_bos else ids
        return [self.bos_id, *ids] if self._adds_bos and ids[:1] != [self.bos_id] else ids

    def encode_bare(self, text: str) -> list[int]:
        """The ids of a text without anything added: as `encode`, but twice as fast for long texts of good Unicode.

        Raises:
            ScantlingInputError: the library refuses the text.
        """
        found = files.guarded(
            lambda: self._library.encode_batch_fast([text], add_special_tokens=False), "the tokenizer refuses this text"
        )
        ids: list[int] = found[0].ids
        return ids

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text without anything added, and for each the characters [start, end) that it stands for.

        Raises:
            ScantlingInputError: as for `encode`.
        """
        found = files.guarded(
            lambda: self._library.encode(text, add_special_tokens=False), "the tokenizer refuses this text"
        )
        return found.ids, found.offsets

    def literal(self) -> Tokenizer:
        """The same tokenizer for text of strangers: what spells a special token is text as any other."""
        tokenizers = need("tokenizers", "read text")
        library = tokenizers.Tokenizer.from_str(self._library.to_str())
        library.encode_special_tokens = True
        return Tokenizer(library, self._marks)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ids: that of the library's decoder, with two improvements.

        Bytes that make no character become U+FFFD without taking complete characters beside them along, and added
        tokens of byte-level vocabularies read as they are written.

        Raises:
            ScantlingInputError: the tokenizer has no such id.
        """
        stream = self.stream(skip_special=skip_special)
        return "".join([stream.push(token_id) for token_id in ids]) + stream.flush()

    def stream(self, *, skip_special: bool = True) -> TokenStream:
        """A decoder for ids that come one by one; see `TokenStream`."""
        return TokenStream([make() for make in self._stages], self._shown if skip_special else self.token)

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it, such as `Ġhello`.

        Raises:
            ScantlingInputError: the tokenizer has no such id.
        """
        try:
            piece = self._library.id_to_token(token_id)
        except (TypeError, OverflowError):
            piece = None
        if piece is None:
            raise ScantlingInputError(f"the tokenizer has no token with id {token_id!r} (it has {self.vocab_size} ids)")
        return str(piece)

    def tokens(self) -> list[str | None]:
        """The whole vocabulary by id, as `token` spells it; None where an id has no token."""
        return [self._library.id_to_token(token_id) for token_id in range(self.vocab_size)]

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a mark, such as [CLS], and no piece of text."""
        return self.token(token_id) in self._special

    @property
    def definition(self) -> str:
        """The text of tokenizer.json as the library writes it."""
        return str(self._library.to_str())

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The ids of all marks, in order."""
        found = (self.id_of(token) for token in self._special)
        return tuple(sorted(token_id for token_id in found if token_id is not None))

    def files(self) -> dict[str, str]:
        """The texts, by file name, from which `from_folder` and `transformers` read this tokenizer again."""
        mask, pad = ("" if token_id is None else self.token(token_id) for token_id in (self.mask_id, self.pad_id))
        library = self._library
        tokens = {"bos_token": self.bos_token, "eos_token": self.eos_token, "mask_token": mask, "pad_token": pad}
        config: dict[str, object] = {name: token for name, token in tokens.items() if token}
        if self._adds_bos and not self._processor_adds_bos:
            library = written.with_bos(library, self.bos_token)
        if self._processor_adds_bos and not self._adds_bos:
            config["add_bos_token"] = False
        return written.texts(library, config, self.bos_id, self.ends, self.chat_template)

    def _shown(self, token_id: int) -> str | None:
        piece = self.token(token_id)
        return None if piece in self._special else piece
