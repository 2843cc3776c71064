"""Text into token ids: documents without special tokens, a context template around document and question."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from kvfix.errors import UsageError

PLAIN_QUESTION = "\n\nQuestion: {question}\nAnswer:"
NEUTRAL_QUESTION = "What does this document say?"
DOCUMENT, QUESTION = "{document}", "{question}"


class Encoding(NamedTuple):
    """A document's tokens behind the context prefix."""

    token_ids: np.ndarray  # [N] int64, prefix included
    offsets: np.ndarray  # [N - num_prefix, 2] int64: characters of the document's tokens
    num_prefix: int


@dataclass(frozen=True)
class Template:
    """What stands before the document, between it and the question, and after the question."""

    name: str
    before: str
    between: str
    after: str


def make_template(choice: str, tokenizer: Any) -> Template:
    """`plain`, `auto` (the chat template where there is one), or text with `{document}` and `{question}`."""
    if choice == "plain" or (choice == "auto" and not getattr(tokenizer, "chat_template", None)):
        between, after = PLAIN_QUESTION.split(QUESTION)
        return Template("plain", "", between, after)
    if choice == "auto":
        message = {"role": "user", "content": f"{DOCUMENT}\n\n{QUESTION}"}
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        return _split("auto", text)
    return _split("given", choice)


def _split(name: str, text: str) -> Template:
    if text.count(DOCUMENT) != 1 or text.count(QUESTION) != 1 or text.index(QUESTION) < text.index(DOCUMENT):
        raise UsageError(
            f"the template {text[:80]!r} needs {DOCUMENT} and, after it, {QUESTION}, once each; "
            "or give 'plain' or 'auto'"
        )
    before, rest = text.split(DOCUMENT)
    between, after = rest.split(QUESTION)
    return Template(name, before, between, after)


class Text:
    """A tokenizer with its template: encodes documents, questions and answers, each apart. Threads may share it."""

    def __init__(self, tokenizer: Any, template: Template) -> None:
        self.tokenizer = tokenizer
        # how marks are read is a state of the tokenizer's: another thread must not change it in mid-call
        self._lock = threading.Lock()
        self.template = template
        self.prefix = (*self._bos(), *self._ids(template.before, special=True))

    def encode(self, text: str) -> Encoding:
        """The prefix and the document's tokens; marks like `<|im_end|>` in the document are ordinary text."""
        return self.encode_all(text)[0]

    def encode_all(self, *texts: str) -> list[Encoding]:
        """`encode` for several documents at once, on as many cores."""
        with self._lock:
            encoded = self.tokenizer(
                list(texts),
                add_special_tokens=False,
                split_special_tokens=True,
                return_offsets_mapping=True,
                return_attention_mask=False,
                verbose=False,
            )
        return [
            Encoding(
                np.array([*self.prefix, *ids], dtype=np.int64),
                np.array(offsets, dtype=np.int64).reshape(-1, 2),
                len(self.prefix),
            )
            for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]

    def plain_ids(self, text: str) -> list[int]:
        """Token ids of a text that is appended verbatim."""
        return self._ids(text, special=False)

    def question_ids(self, question: str) -> list[int]:
        """Token ids of a question in its template, ready to stand behind the document."""
        template = self.template
        return [
            *self._ids(template.between, special=True),
            *self._ids(question, special=False),
            *self._ids(template.after, special=True),
        ]

    def query_ids(self, question: str) -> list[int]:
        """A question as users give it: verbatim where it begins with white space, else in its template.

        Raises `UsageError` for an empty one.
        """
        if not question.strip():
            raise UsageError("the question is empty")
        return self.plain_ids(question) if question[0].isspace() else self.question_ids(question)

    @cached_property
    def neutral_ids(self) -> tuple[int, ...]:
        """A question about nothing in particular, ready to stand behind the document: what others are compared with."""
        return tuple(self.question_ids(NEUTRAL_QUESTION))

    def decode(self, ids: list[int]) -> str:
        with self._lock:
            return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        if not text:
            return []
        with self._lock:
            encoded = self.tokenizer(
                text, add_special_tokens=False, split_special_tokens=not special, return_attention_mask=False
            )
        return list(encoded["input_ids"])

    def _bos(self) -> list[int]:
        """The BOS, if this tokenizer puts one before a text by itself and the template does not name it."""
        bos = self.tokenizer.bos_token_id
        if bos is None or self.template.before.startswith(self.tokenizer.bos_token or "\0"):
            return []
        ids = self.tokenizer("x", return_attention_mask=False)["input_ids"]
        return [bos] if ids and ids[0] == bos else []
