"""The tokens of a sentence: their names for readers, and the search for one by its word.

A name is the text of the sentence at that place, never a tokenizer's spelling of it; a piece that continues a word
begins with "·". Names hold printable characters only, so that no sentence can send control codes to a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from levelhead.errors import LevelheadValueError, bad_value

TOKENS = 256  # of a sentence at most
_WORD = re.compile(r"\w+(?:['’\-]\w+)*|[^\w\s]")
_LISTED = 40  # tokens that an error names


@dataclass(frozen=True)
class Tokens:
    names: tuple[str, ...]
    words: tuple[str, ...]  # the word each belongs to, itself for a mark
    special: tuple[bool, ...]  # marks that the tokenizer adds, such as [CLS]
    ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def distinct(self) -> tuple[str, ...]:
        """The names; those that occur twice with their position: the [4]."""
        return tuple(f"{name} [{i}]" if self.names.count(name) > 1 else name for i, name in enumerate(self.names))

    def find(self, wanted: str | int) -> tuple[int, str]:
        """The token of a word or position, and a note where there was a choice."""
        if isinstance(wanted, int):
            if not 0 <= wanted < len(self):
                raise self._missing(f"position {wanted}")
            return wanted, ""
        word = wanted.strip().casefold()
        positions = _matching(word, self.words) or _matching(word, self.names)
        if not positions:
            raise self._missing(quoted(wanted))
        return positions[-1], self._note(positions)

    def _note(self, positions: Sequence[int]) -> str:
        first = last = positions[-1]
        while first - 1 in positions and self.words[first - 1] and self.names[first].startswith("·"):
            first -= 1
        notes = []
        if first > positions[0]:
            notes.append(f"{quoted(self.words[last])} occurs more than once: this is the last one")
        if first < last:
            notes.append(f"{quoted(self.words[last])} is {last - first + 1} tokens: the last is used")
        return "; ".join(notes)

    def _missing(self, given: str) -> LevelheadValueError:
        names = ", ".join(self.names[:_LISTED]) + ", …" * (len(self) > _LISTED)
        return bad_value("token", f"a word of the sentence, whose tokens are {names}", given, "Choose one of them")


def _matching(word: str, names: Sequence[str]) -> list[int]:
    return [i for i, name in enumerate(names) if name.casefold() == word]


def of_words(sentence: str) -> Tokens:
    """A token for every word and every punctuation mark."""
    words = tuple(map(printable, _WORD.findall(sentence)))
    return Tokens(words, words, (False,) * len(words))


def of_tokenizer(tokenizer: Any, sentence: str) -> Tokens:
    """The tokens of a model's (fast) tokenizer, with the marks it adds."""
    encoded = tokenizer(sentence, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
    ids, spans, word_ids = encoded["input_ids"], encoded["offset_mapping"], encoded.word_ids()
    special = tuple(map(bool, encoded["special_tokens_mask"]))
    spelled = tokenizer.convert_ids_to_tokens(ids)
    names, words = [], []
    for i, (begin, end) in enumerate(spans):
        if special[i]:
            names.append(printable(spelled[i]))
            words.append(names[-1])
        else:
            pieces = [spans[j] for j, word in enumerate(word_ids) if word == word_ids[i] and not special[j]]
            continues = i > 0 and not special[i - 1] and word_ids[i - 1] == word_ids[i]
            names.append("·" * continues + printable(sentence[begin:end]))
            words.append(printable(sentence[pieces[0][0] : pieces[-1][1]]))
    return Tokens(tuple(names), tuple(words), special, tuple(ids))


def checked(tokens: Tokens) -> Tokens:
    """The tokens; an error unless there are words among them, and not too many."""
    if all(tokens.special):
        raise bad_value("sentence", "words", "none that the model's tokenizer knows", "Write a few words")
    if len(tokens) > TOKENS:
        raise bad_value("sentence", f"at most {TOKENS} tokens", len(tokens), "Give a shorter one")
    return tokens


def printable(text: str) -> str:
    """The text without surrounding space; unprintable characters become �, an empty text ␣."""
    return "".join(c if c.isprintable() else "�" for c in text.strip()) or "␣"


def quoted(text: str) -> str:
    """For messages: in quotation marks, and short."""
    shown = printable(text)
    return f"“{shown if len(shown) <= 40 else shown[:39] + '…'}”"
