"""Corpora: what is read, what is passed over and why, and how documents are named."""

import hashlib
import os
import socket
import sys

import pytest

from kvfix import corpus as corpus_module
from kvfix.core import Document
from kvfix.corpus import Skipped, document_of, find_document, read_document, resolve_corpus, scan
from kvfix.errors import DocumentError, UnknownDocumentError, UsageError


@pytest.fixture
def corpus(tmp_path):
    """An empty corpus, beside which a test may put other files."""
    directory = tmp_path / "corpus"
    directory.mkdir()
    return directory


def put(path, content=b"text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def ids(found):
    return [item.doc_id for item in found]


def reasons(found):
    return {item.doc_id: item.reason for item in found if isinstance(item, Skipped)}


def test_read_keeps_the_text_as_it_is(corpus):
    text = "naïve 🎉  x != y\r\nlast\n\n"
    path = put(corpus / "a" / "b.md", text.encode())
    document = read_document(path, str(corpus))
    assert document == Document(str(corpus), "a/b.md", text, hashlib.sha256(text.encode()).hexdigest())


@pytest.mark.parametrize(("content", "text"), [(b"", ""), (b"\xef\xbb\xbf", ""), (b"\xef\xbb\xbfHi", "Hi")])
def test_byte_order_mark_is_no_text(corpus, content, text):
    document = read_document(put(corpus / "a.md", content), str(corpus))
    assert document.text == text
    assert document.sha256 == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a" * 1034 + b"\x93quoted\x94", "refunds.md: not UTF-8 at byte 1034 (0x93): invalid start byte"),
        (b"\xef\xbb\xbfab\xff", "refunds.md: not UTF-8 at byte 5 (0xff): invalid start byte"),
        ("é".encode()[:1], "refunds.md: not UTF-8 at byte 0 (0xc3): unexpected end of data"),
        (b"\xed\xa0\x80", "refunds.md: not UTF-8 at byte 0 (0xed): invalid continuation byte"),
        ("Hi".encode("utf-16"), "refunds.md: not UTF-8 at byte 0 (0xff): invalid start byte"),
        (b"abc\0def", "refunds.md: binary: a NUL byte at byte 3"),
        (b"\xef\xbb\xbfabc\0", "refunds.md: binary: a NUL byte at byte 6"),
    ],
)
def test_what_is_not_utf8_is_named_with_its_offset(corpus, content, message):
    with pytest.raises(DocumentError) as caught:
        read_document(put(corpus / "refunds.md", content), str(corpus))
    assert caught.value.message == message
    assert caught.value.exit_code == 3
    put(corpus / "fine.md")
    assert list(scan(corpus))[1] == Skipped("refunds.md", message.removeprefix("refunds.md: "))


def test_missing_large_and_outside_files(corpus, tmp_path):
    with pytest.raises(DocumentError, match=r"no\.md: cannot be read: No such file"):
        read_document(corpus / "no.md", str(corpus))
    with pytest.raises(DocumentError, match=r"big\.md: 11 bytes; the limit .* is 10"):
        read_document(put(corpus / "big.md", b"x" * 11), str(corpus), max_bytes=10)
    assert read_document(put(corpus / "fit.md", b"x" * 10), str(corpus), max_bytes=10).text == "x" * 10
    with pytest.raises(DocumentError, match="outside the corpus"):
        read_document(put(tmp_path / "corpus-2" / "a.md"), str(corpus))
    with pytest.raises(DocumentError, match="outside the corpus"):
        read_document(corpus / ".." / "corpus-2" / "a.md", str(corpus))


def test_scan_order_globs_and_hidden(corpus):
    for name in [
        "b.md",
        "a.txt",
        "c/x.rst",
        "c/a/y.markdown",
        "c.md",
        "D.MD",
        "n.html",
        ".h.md",
        ".git/z.md",
        "e/.z.md",
    ]:
        put(corpus / name)
    assert ids(scan(corpus)) == ["D.MD", "a.txt", "b.md", "c/a/y.markdown", "c/x.rst", "c.md"]


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (["*.html"], [], ["n.html"]),
        (["*"], ["*.md"], ["c/x.rst", "n.html"]),
        (["*.md"], ["c"], ["b.md", "d/c.md"]),
        (["*.md"], ["c/"], ["b.md", "d/c.md"]),
        (["*.md"], ["c/*"], ["b.md", "d/c.md"]),
        (["**/*.md"], ["**/c.md"], ["b.md", "c/a/y.md"]),
        (["c/**"], [], ["c/a/y.md", "c/x.rst"]),
    ],
)
def test_patterns(corpus, include, exclude, expected):
    for name in ["b.md", "c/x.rst", "c/a/y.md", "d/c.md", "n.html"]:
        put(corpus / name)
    assert ids(scan(corpus, include, exclude)) == expected


def test_scan_reads_as_it_goes(corpus, monkeypatch):
    for name in "abc":
        put(corpus / f"{name}.md")
    found = scan(corpus)
    put(corpus / "c.md", b"later")
    assert [item.text for item in found] == ["text", "text", "later"]


def test_symlinks(corpus, tmp_path):
    outside = put(tmp_path / "outside" / "o.md")
    put(corpus / "a.md")
    put(corpus / "sub" / "b.md")
    links = {
        "in.md": corpus / "a.md",
        "relative.md": "sub/../a.md",
        "out.md": outside,
        "broken.md": "nowhere.md",
        "loop.md": "loop.md",
        "indir": corpus / "sub",
        "outdir": outside.parent,
        "sub/up": "..",
        "out.bin": outside,
        ".out.md": outside,
    }
    for name, target in links.items():
        os.symlink(target, corpus / name)
    found = list(scan(corpus))
    assert [item.doc_id for item in found if isinstance(item, Document)] == ["a.md", "in.md", "relative.md", "sub/b.md"]
    assert reasons(found) == {
        "broken.md": "a broken symlink",
        "loop.md": "not a regular file (symlink loop)",
        "out.md": "a symlink that leads out of the corpus",
        "outdir/": "a symlink that leads out of the corpus",
    }
    with pytest.raises(DocumentError, match=r"out\.md: a symlink that leads out"):
        read_document(corpus / "out.md", str(corpus))
    assert read_document(corpus / "indir" / "b.md", str(corpus)).doc_id == "sub/b.md"


def test_a_corpus_reached_through_a_symlink(corpus, tmp_path):
    put(corpus / "a.md")
    os.symlink(corpus, tmp_path / "link")
    (document,) = scan(tmp_path / "link")
    assert (document.corpus, document.doc_id) == (str(corpus), "a.md")
    assert read_document(tmp_path / "link" / "a.md", str(corpus)) == document


def test_special_files_are_never_opened(corpus, monkeypatch):
    os.mkfifo(corpus / "pipe.md")
    monkeypatch.chdir(corpus)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.md")
        found = list(scan(corpus))
    assert reasons(found) == {"pipe.md": "not a regular file (FIFO)", "socket.md": "not a regular file (socket)"}


def test_unreadable_files_and_directories(corpus, monkeypatch):
    for name in ["a.md", "b.md", "closed/c.md"]:
        put(corpus / name)
    real_open, real_scandir = os.open, os.scandir

    def refuse(real, end):
        def call(path, *rest):
            if str(path).endswith(end):
                raise PermissionError(13, "Permission denied")
            return real(path, *rest)

        return call

    monkeypatch.setattr(corpus_module.os, "open", refuse(real_open, "b.md"))
    monkeypatch.setattr(corpus_module.os, "scandir", refuse(real_scandir, "closed"))
    found = list(scan(corpus))
    assert reasons(found) == {
        "b.md": "cannot be read: Permission denied",
        "closed/": "cannot be listed: Permission denied",
    }
    assert ids(found) == ["a.md", "b.md", "closed/"]


@pytest.mark.skipif(sys.platform == "darwin", reason="file names are UTF-8 there")
def test_names_that_are_not_utf8(corpus):
    put(corpus / "a.md")
    with open(os.fsencode(corpus) + b"/caf\xe9.md", "wb") as file:
        file.write(b"text")
    found = list(scan(corpus))
    assert reasons(found) == {"caf\\xe9.md": "its name is not UTF-8"}
    for item in found:
        item.doc_id.encode()


@pytest.mark.parametrize(("num_changes", "text"), [(1, "text!"), (2, None)])
def test_a_file_that_changes_while_it_is_read(corpus, monkeypatch, num_changes, text):
    path, calls = put(corpus / "a.md"), []
    real = os.fstat

    def fstat(descriptor):
        calls.append(descriptor)
        # odd calls precede a reading, even ones follow it
        if len(calls) % 2 == 0 and len(calls) <= 2 * num_changes:
            with path.open("ab") as file:
                file.write(b"!")
        return real(descriptor)

    monkeypatch.setattr(corpus_module.os, "fstat", fstat)
    if text is None:
        with pytest.raises(DocumentError, match=r"a\.md: it changed while it was read, twice"):
            read_document(path, str(corpus))
    else:
        assert read_document(path, str(corpus)).text == text


def test_a_long_line_without_spaces(corpus):
    put(corpus / "a.md", b"x" * 200_000)
    (document,) = scan(corpus)
    assert len(document.text) == 200_000


def test_missing_and_empty_corpora_are_refused_at_once(corpus, monkeypatch):
    with pytest.raises(UsageError, match="no such directory"):
        scan(corpus / "none")
    with pytest.raises(UsageError, match="not a directory"):
        scan(put(corpus / "a.bin"))
    with pytest.raises(UsageError, match=r"no documents here .*\*\.md"):
        scan(corpus)

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(corpus_module.os, "listdir", refuse)
    with pytest.raises(UsageError, match="cannot be listed: Permission denied"):
        scan(corpus)


def test_text_from_elsewhere():
    assert document_of("/c", "a.md", "é") == document_of("/c", "a.md", b"\xef\xbb\xbf\xc3\xa9")
    assert document_of("/c", "a.md", "é").sha256 == hashlib.sha256("é".encode()).hexdigest()
    with pytest.raises(DocumentError, match=r"a\.md: half a surrogate pair at character 1"):
        document_of("/c", "a.md", "x\ud800")
    with pytest.raises(DocumentError, match=r"a\.md: not UTF-8 at byte 1"):
        document_of("/c", "a.md", b"x\xff")


def test_resolve_corpus(corpus, tmp_path):
    path = put(corpus / "a" / "b" / "x.md")
    top, middle = str(corpus), str(corpus / "a")
    os.symlink(corpus, tmp_path / "link")
    assert resolve_corpus(tmp_path / "link", []) == top
    assert resolve_corpus(tmp_path / "link" / "a" / "b" / "x.md", []) == str(path.parent)
    assert resolve_corpus(path, [top, str(tmp_path / "corp"), "/elsewhere"]) == top
    assert resolve_corpus(path, [top, middle]) == middle
    assert resolve_corpus(corpus / "a", [top]) == middle
    assert resolve_corpus(path, ["/"]) == "/"
    with pytest.raises(UsageError, match="no such file"):
        resolve_corpus(corpus / "none.md", [top])


def test_find_document(corpus, tmp_path, monkeypatch):
    for name in ["refunds.md", "policies/refunds.md", "new.md"]:
        put(corpus / name)
    top, other = str(corpus), str(tmp_path / "other")
    known = [(top, "refunds.md"), (top, "policies/refunds.md"), (other, "terms.md"), (other, "refunds.md")]
    monkeypatch.chdir(corpus)
    assert find_document("refunds.md", known) == (top, "refunds.md")
    assert find_document("./policies/../refunds.md", known) == (top, "refunds.md")
    assert find_document(str(corpus / "policies" / "refunds.md"), known) == (top, "policies/refunds.md")
    assert find_document("terms.md", known) == (other, "terms.md")
    monkeypatch.chdir(tmp_path)
    assert find_document("corpus/refunds.md", known) == (top, "refunds.md")
    assert find_document("other/refunds.md", known) == (other, "refunds.md")  # its file is gone
    assert find_document("policies/refunds.md", known) == (top, "policies/refunds.md")
    assert find_document("policies//refunds.md", known) == (top, "policies/refunds.md")


def test_a_document_in_nested_corpora_belongs_to_the_nearest(corpus):
    path = put(corpus / "a" / "x.md")
    known = [(str(corpus), "a/x.md"), (str(corpus / "a"), "x.md")]
    assert find_document(str(path), known) == known[1]
    assert find_document(str(path), known[:1]) == known[0]


def test_unknown_documents_say_what_was_meant(corpus, tmp_path, monkeypatch):
    put(corpus / "new.md")
    top, other = str(corpus), str(tmp_path / "other")
    known = [(top, "refunds.md"), (other, "refunds.md"), (top, "policies/travel.md")]
    monkeypatch.chdir(tmp_path)

    def message(arg, known=known):
        with pytest.raises(UnknownDocumentError) as caught:
            find_document(arg, known)
        return caught.value.message

    assert message("refunds.md").endswith(f"{top}/refunds.md, {other}/refunds.md")
    assert "Close: policies/travel.md." in message("travle.md")
    assert "Close: policies/travel.md." in message("travel.md")
    assert "Close" not in message("zzz")
    assert "kvfix status" in message("../../x")
    assert f"never built; run: kvfix build {top}" in message("corpus/new.md")
    assert "kvfix build PATH" in message("refunds.md", [])
