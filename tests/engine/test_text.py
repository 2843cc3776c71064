"""Text into token ids: marks in a document are ordinary text, one BOS, the template around document and question."""

import time

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from kvfix.engine.text import Text, make_template
from kvfix.errors import DocumentError, UsageError

MARKS = ["<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BOS = 0
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def tokenizer(zoo):
    return AutoTokenizer.from_pretrained(zoo("llama"))


@pytest.fixture
def beginner(tokenizer):
    """A tokenizer that puts a BOS before every text by itself, as Llama's does."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    assert tokenizer("x")["input_ids"][0] == BOS
    return tokenizer


def plain(tokenizer) -> Text:
    return Text(tokenizer, make_template("plain", tokenizer))


@pytest.mark.parametrize("mark", [*MARKS, "[INST]", "<unk>"])
def test_marks_in_a_document_are_ordinary_text(tokenizer, mark):
    text = plain(tokenizer)
    source = f"before {mark} after{mark}"
    ids = text.encode(source).token_ids
    assert not set(ids.tolist()) & set(range(len(MARKS)))
    assert tokenizer.decode(ids) == source
    # also once special tokens have been encoded as such
    text.question_ids("what?")
    Text(tokenizer, make_template("<|im_start|>{document}<|im_end|>{question}", tokenizer))
    assert np.array_equal(text.encode(source).token_ids, ids)


def test_marks_in_questions_and_answers_are_ordinary_text(tokenizer):
    text = Text(tokenizer, make_template("{document}<|im_start|>{question}<|im_end|>", tokenizer))
    ids = text.question_ids("is <|im_end|> here?")
    assert ids[0] == MARKS.index("<|im_start|>")
    assert ids[-1] == MARKS.index("<|im_end|>")
    assert not set(ids[1:-1]) & set(range(len(MARKS)))
    assert tokenizer.decode(text.plain_ids("</s>")) == "</s>"
    assert text.plain_ids("") == []


def test_one_bos_where_the_tokenizer_gives_one(beginner):
    encoding = plain(beginner).encode("<s>text")
    assert encoding.num_prefix == 1
    assert encoding.token_ids[0] == BOS
    assert (encoding.token_ids == BOS).sum() == 1
    assert plain(beginner).question_ids("and?").count(BOS) == 0
    assert plain(beginner).plain_ids("an answer").count(BOS) == 0


def test_no_bos_where_the_tokenizer_gives_none(tokenizer):
    encoding = plain(tokenizer).encode("text")
    assert encoding.num_prefix == 0
    assert BOS not in encoding.token_ids


@pytest.mark.parametrize(("template", "num_bos"), [("<s>say {document}{question}", 1), ("say {document}{question}", 1)])
def test_one_bos_with_a_template(beginner, template, num_bos):
    encoding = Text(beginner, make_template(template, beginner)).encode("text")
    assert encoding.token_ids[0] == BOS
    assert (encoding.token_ids == BOS).sum() == num_bos
    assert encoding.num_prefix == 1 + len(beginner("say ", add_special_tokens=False)["input_ids"])


class TestTemplates:
    def test_auto_is_the_chat_template(self, tokenizer):
        tokenizer.chat_template = CHAT
        template = make_template("auto", tokenizer)
        assert template.name == "auto"
        assert template.before == "<|im_start|>user\n"
        assert template.between == "\n\n"
        assert template.after == "<|im_end|>\n<|im_start|>assistant\n"
        text = Text(tokenizer, template)
        assert text.prefix[0] == MARKS.index("<|im_start|>")
        assert tokenizer.decode([*text.encode("A doc").token_ids, *text.question_ids("Why?")]) == (
            "<|im_start|>user\nA doc\n\nWhy?<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_auto_without_a_chat_template_is_plain(self, tokenizer):
        assert make_template("auto", tokenizer) == make_template("plain", tokenizer)

    def test_plain_is_plain_even_with_a_chat_template(self, tokenizer):
        tokenizer.chat_template = CHAT
        template = make_template("plain", tokenizer)
        assert (template.name, template.before) == ("plain", "")
        assert tokenizer.decode(Text(tokenizer, template).question_ids("Why?")) == "\n\nQuestion: Why?\nAnswer:"

    def test_given(self, tokenizer):
        template = make_template("Read: {document}\nQ {question} A", tokenizer)
        assert (template.before, template.between, template.after) == ("Read: ", "\nQ ", " A")

    @pytest.mark.parametrize(
        "given",
        ["", "{document}", "{question}", "{question}{document}", "{document}{document}{question}", "chat", "PLAIN"],
    )
    def test_others_are_refused(self, tokenizer, given):
        with pytest.raises(UsageError, match=r"\{document\}"):
            make_template(given, tokenizer)


class TestOffsets:
    @pytest.mark.parametrize(
        "source",
        ["the other thing", "  two  spaces ", "x != y\r\nnext", "naïve — ✓ 漢字 🙂!", "\n", "<|im_end|> here", "é" * 9],
    )
    def test_cover_the_text_in_order(self, beginner, source):
        encoding = plain(beginner).encode(source)
        offsets = encoding.offsets
        assert offsets.shape == (len(encoding.token_ids) - 1, 2)
        assert offsets.dtype == encoding.token_ids.dtype == np.int64
        assert (np.diff(offsets, axis=0) >= 0).all()
        assert {char for start, end in offsets for char in range(start, end)} == set(range(len(source)))

    def test_of_nothing(self, beginner):
        encoding = plain(beginner).encode("")
        assert encoding.token_ids.tolist() == [BOS]
        assert encoding.offsets.shape == (0, 2)


def test_a_document_beyond_the_context_is_refused_with_both_counts(gated):
    engine = gated("llama")
    assert len(engine.encode("x" * 512).token_ids) == 512
    with pytest.raises(DocumentError, match=r"513 tokens.*llama takes at most 512") as caught:
        engine.encode("x" * 513)
    assert caught.value.exit_code == 3


def test_a_line_of_200_kb_takes_seconds_at_most(gated):
    line = "".join(chr(97 + (n * 7919) % 26) for n in range(200_000))
    start = time.perf_counter()
    with pytest.raises(DocumentError):
        gated("llama").encode(line)
    assert time.perf_counter() - start < 20
