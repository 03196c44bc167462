"""Tokenizers: one that is given, or a byte-level BPE that is trained here; and the tokens of documents.

    tokens = Tokens(Path("news.tokenizer.json"), start=None)
    tokens.encoded(["a text", "another"])                # their tokens; each document begins with tokens.start

What is trained here has `<|start|>` as its first token, every byte after it, and pairs that are frequent. Texts are cut
into pieces where no token of it can lie, before a word, so that memory is bounded however long a document is.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from meshrun.errors import UserError

START = "<|start|>"
_STARTS = (START, "<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>", "[BOS]", "<|endoftext|>")
"""What tokenizers call the token that a text begins with; the last one is GPT-2's, which stands between texts."""
_PIECE = 1 << 16
_BEFORE_A_WORD = re.compile(r"(?<=\S) (?=\S)")


class Tokens:
    """A tokenizer, and the token that each document begins with."""

    def __init__(self, path: Path, start: str | None) -> None:
        if not path.is_file():
            raise UserError(f"there is no tokenizer {path}; give the tokenizer.json of one (--tokenizer)")
        try:
            self.tokenizer: Any = library().Tokenizer.from_file(str(path))
        except Exception as error:  # the library has no types for its errors
            raise UserError(f"{path} is not a tokenizer that `tokenizers` reads: {error} (--tokenizer)") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        names = (start,) if start is not None else _STARTS
        found = [self.tokenizer.token_to_id(name) for name in names]
        if not any(each is not None for each in found):
            looked = f"no token {start!r}" if start is not None else f"none of the tokens {', '.join(_STARTS)}"
            raise UserError(f"{path} has {looked} for a document to begin with; name one that it has (--start)")
        self.start = int(next(each for each in found if each is not None))
        self.vocabulary = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.cuts = _splits_at_words(json.loads(self.tokenizer.to_str()))
        if names[found.index(self.start)] == START:
            # In a text it is text: nobody can begin a document in the middle of another by writing it.
            self.tokenizer.encode_special_tokens = True

    def pieces(self, texts: Iterable[str]) -> Iterator[str]:
        """A document in pieces whose tokens, one after the other, are those of the whole."""
        return pieces(texts) if self.cuts else iter(["".join(texts)])

    def encoded(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text, without start."""
        return [each.ids for each in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


@functools.lru_cache(1)
def opened(path: Path, start: str | None, sha256: str) -> Tokens:
    """The tokenizer in a file of this checksum, read once a process."""
    del sha256  # under one name there may be another tokenizer later
    return Tokens(path, start)


def pieces(texts: Iterable[str]) -> Iterator[str]:
    """A text cut before words, into pieces of about equal length."""
    rest = ""
    for text in texts:
        rest += text
        at = 0
        # A cut needs to see what comes behind the space.
        while len(rest) - at > _PIECE and (found := _BEFORE_A_WORD.search(rest, at + _PIECE)):
            yield rest[at : found.start()]
            at = found.start()
        rest = rest[at:]
    if rest:
        yield rest


def _splits_at_words(document: dict[str, Any]) -> bool:
    """Whether a tokenizer never joins a space and a word behind it to what is before, and adds nothing to texts."""
    before = document.get("pre_tokenizer") or {}
    plain = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    added = document.get("added_tokens") or []
    wide = any(each.get("lstrip") or each.get("rstrip") or " " in each["content"] for each in added)
    return not document.get("normalizer") and not wide and all(before.get(key) == plain[key] for key in plain)


def train(texts: Iterable[str], vocabulary: int, path: Path) -> None:
    """Train a byte-level BPE on texts and write it.

    The same texts give the same bytes, on any number of cores: pairs of equal frequency are taken in the order of
    their numbers.
    """
    tokenizers = library()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[START],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.write_text(tokenizer.to_str(pretty=False), encoding="utf-8")


def library() -> Any:
    """`tokenizers`, which is optional."""
    try:
        return importlib.import_module("tokenizers")
    except ImportError:
        raise UserError(
            "texts are turned into tokens by `tokenizers`, which is not installed; pip install 'meshrun[text]'"
        ) from None
