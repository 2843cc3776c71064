"""Past edits out of git: what is taken, what is passed over and counted, and that a repository runs nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfix.bench import history as history_module
from kvfix.bench.history import History, PastEdit, open_history
from kvfix.errors import UsageError

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
WORDS = "".join(f"Line {n} of a document about the railway.\n" for n in range(12))


class Repo:
    """A repository that a test writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str, **more: object) -> str:
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        command = ["git", *identity, "-C", str(self.folder), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, **more).stdout  # type: ignore[call-overload]

    def write(self, name: str | bytes, content: str | bytes) -> None:
        path = os.path.join(os.fsencode(self.folder), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)

    def commit(self, files: dict[str | bytes, str | bytes] | None = None) -> str:
        for name, content in (files or {}).items():
            self.write(name, content)
        self.git("add", "-A")
        self.git("commit", "-qm", "a change", "--allow-empty")
        return self.git("rev-parse", "HEAD").strip()


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    return Repo(tmp_path / "repo")


def read(repo: Repo, **options: object) -> tuple[list[PastEdit], History]:
    history = open_history(repo.folder)
    for name, value in options.items():
        setattr(history, name, value)
    return list(history.edits()), history


class TestWhatIsTaken:
    def test_edits_of_documents_alone(self, repo):
        repo.commit({"a.md": WORDS, "b.RST": WORDS, "code.py": "x = 1\n"})
        repo.commit({"code.py": "x = 2\n"})
        commit = repo.commit({"a.md": WORDS + "More.\n", "deep/er/c.txt": "new\n", "b.RST": "Less.\n" + WORDS})
        edits, history = read(repo)
        assert {(e.commit, e.path, e.before, e.after, e.renamed) for e in edits} == {
            (commit, "a.md", WORDS, WORDS + "More.\n", False),
            (commit, "b.RST", WORDS, "Less.\n" + WORDS, False),
        }
        assert history.skipped == {"added": 1}
        assert (history.num_commits, history.num_read) == (2, 2)

    def test_a_byte_order_mark_is_no_text(self, repo):
        repo.commit({"a.md": "\ufeffone\r\n"})
        repo.commit({"a.md": "two\r\n"})
        assert [(e.before, e.after) for e in read(repo)[0]] == [("one\r\n", "two\r\n")]

    def test_renames_are_followed(self, repo):
        repo.commit({"a.md": WORDS, "b.md": WORDS[::-1]})
        repo.git("mv", "a.md", "new name.md")
        repo.git("mv", "b.md", "c.md")
        repo.commit({"new name.md": WORDS + "More.\n"})
        edits, history = read(repo)
        assert [(e.path, e.after, e.renamed) for e in edits] == [("new name.md", WORDS + "More.\n", True)]
        assert history.skipped == {"renamed only": 1}

    def test_merges_are_left_to_what_they_merge(self, repo):
        repo.commit({"a.md": WORDS, "b.md": WORDS})
        repo.git("checkout", "-qb", "side")
        side = repo.commit({"a.md": WORDS + "Side.\n"})
        repo.git("checkout", "-q", "main")
        main = repo.commit({"b.md": WORDS + "Main.\n"})
        repo.git("merge", "-q", "--no-ff", "-m", "merge", "side")
        edits, history = read(repo)
        assert {e.commit for e in edits} == {side, main}
        assert history.repository.num_merges() == 1

    def test_a_directory_in_a_repository_stands_for_what_is_below_it(self, repo):
        repo.commit({"a.md": "one\n", "docs/b.md": "one\n"})
        repo.commit({"a.md": "two\n", "docs/b.md": "two\n"})
        repo.folder = repo.folder / "docs"
        assert [e.path for e in read(repo)[0]] == ["docs/b.md"]

    def test_patterns_choose(self, repo):
        repo.commit({"a.md": "one\n", "docs/b.adoc": "one\n"})
        repo.commit({"a.md": "two\n", "docs/b.adoc": "two\n"})
        assert [e.path for e in read(repo, include=("*.adoc",))[0]] == ["docs/b.adoc"]
        assert [e.path for e in read(repo, include=("docs/*",))[0]] == ["docs/b.adoc"]

    def test_odd_names(self, repo):
        names = ['new\nline "quoted".md', "tab\there.md", "größe 道.md", b"latin-\xe9.md", ":(top)x.md", "-c.md"]
        repo.commit(dict.fromkeys(names, "one\n"))
        for name in names:
            repo.commit({name: "two\n"})
        expected = {n.decode("utf-8", "backslashreplace") if isinstance(n, bytes) else n for n in names}
        assert {e.path for e in read(repo)[0]} == expected

    def test_the_order_is_the_seed_s(self, repo):
        for n in range(9):
            repo.commit({"a.md": f"{n}\n"})
        orders = [[e.after for e in read(repo, seed=seed)[0]] for seed in (0, 0, 1)]
        assert orders[0] == orders[1] != orders[2]
        assert set(orders[0]) == set(orders[2]) == {f"{n}\n" for n in range(1, 9)}

    def test_no_commit_makes_up_the_sample(self, repo):
        repo.commit({f"{n}.md": "one\n" for n in range(9)})
        repo.commit({f"{n}.md": "two\n" for n in range(9)})
        edits, history = read(repo)
        assert len(edits) == history_module.PER_COMMIT == 4
        assert history.skipped == {"beyond 4 documents of one commit": 5}

    def test_a_shallow_clone_ends_where_it_ends(self, repo, tmp_path):
        for n in range(5):
            repo.commit({"a.md": f"{n}\n"})
        clone = Repo(tmp_path / "clone")
        clone.git("fetch", "-q", "--depth=3", f"file://{repo.folder}", "main")
        clone.git("reset", "-q", "--hard", "FETCH_HEAD")
        edits, history = read(clone)
        assert sorted(e.after for e in edits) == ["3\n", "4\n"]
        assert history.repository.is_shallow


class TestWhatIsPassedOver:
    def test_what_is_no_text_or_too_long(self, repo):
        repo.commit({"binary.md": b"a\0b\n", "latin.txt": b"caf\xe9\n", "huge.md": "one\n", "fine.md": "one\n"})
        repo.commit({"binary.md": b"a\0c\n", "latin.txt": b"caf\xe9s\n", "huge.md": "y" * 5000, "fine.md": "two\n"})
        edits, history = read(repo, max_bytes=4000)
        assert [e.path for e in edits] == ["fine.md"]
        reasons = {"binary": 1, "not UTF-8": 1, "larger than 4000 bytes": 1}
        assert history.skipped == reasons

    def test_a_huge_file_is_not_read(self, repo, monkeypatch):
        repo.commit({"a.md": "one\n"})
        repo.commit({"a.md": "y" * 5000})
        asked: list[int] = []
        real = history_module.CatFile.read
        monkeypatch.setattr(history_module.CatFile, "read", lambda self, size: asked.append(size) or real(self, size))
        assert read(repo, max_bytes=4000)[0] == []
        assert asked == [4]

    def test_links_submodules_and_changes_of_kind(self, repo):
        repo.commit({"text.md": WORDS, "becomes.md": WORDS})
        os.symlink("text.md", repo.folder / "link.md")
        one, two = (repo.git("rev-parse", "HEAD").strip(), "1" * 40)
        repo.git("add", "-A")
        repo.git("update-index", "--add", "--cacheinfo", f"160000,{one},module.md")
        repo.git("commit", "-qm", "add")
        for name in ("link.md", "becomes.md"):
            (repo.folder / name).unlink()
        os.symlink("other.md", repo.folder / "link.md")
        os.symlink("text.md", repo.folder / "becomes.md")
        repo.git("add", "link.md", "becomes.md")
        repo.git("update-index", "--cacheinfo", f"160000,{two},module.md")
        repo.git("commit", "-qm", "change")
        edits, history = read(repo)
        assert edits == []
        assert history.skipped == {"symlink": 3, "submodule": 2}

    def test_deletions(self, repo):
        repo.commit({"a.md": WORDS, "b.md": "one\n"})
        (repo.folder / "b.md").unlink()
        repo.commit({"a.md": WORDS + "More.\n"})
        edits, history = read(repo)
        assert [e.path for e in edits] == ["a.md"]
        assert history.skipped == {"deleted": 1}

    def test_objects_that_are_not_there(self, repo):
        repo.commit({"a.md": "one\n", "b.md": "one\n"})
        repo.commit({"a.md": "two\n", "b.md": "three\n"})
        blob = repo.git("rev-parse", "HEAD:a.md").strip()
        (repo.folder / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
        edits, history = read(repo)
        assert [e.path for e in edits] == ["b.md"]
        assert history.skipped["not in this clone"] == 1


class TestWhereThereIsNothing:
    def test_an_empty_repository(self, repo):
        with pytest.raises(UsageError, match="no commit yet"):
            open_history(repo.folder)

    def test_no_repository(self, tmp_path, monkeypatch):
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
        (tmp_path / "plain").mkdir()
        with pytest.raises(UsageError, match="not a git repository"):
            open_history(tmp_path / "plain")

    def test_no_directory(self, tmp_path):
        with pytest.raises(UsageError, match="no such directory"):
            open_history(tmp_path / "none")

    def test_no_git(self, repo, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(UsageError, match="not on PATH"):
            open_history(repo.folder)

    def test_no_documents(self, repo):
        repo.commit({"code.py": "x = 1\n"})
        edits, history = read(repo)
        assert (edits, history.num_commits) == ([], 0)


class TestHostileRepositories:
    @pytest.fixture
    def trap(self, repo, tmp_path) -> Callable[[], bool]:
        """A program that leaves a trace; the repository's settings name it wherever git takes a program."""
        trace, program = tmp_path / "trace", tmp_path / "evil"
        program.write_text(f"#!/bin/sh\necho run >> {trace}\n")
        program.chmod(0o755)
        repo.commit({".gitattributes": "*.md diff=evil filter=evil\n", "a.md": WORDS, "b.md": WORDS[::-1]})
        repo.git("mv", "b.md", "c.md")
        repo.commit({"a.md": WORDS + "More.\n", "c.md": WORDS[::-1] + "More.\n"})
        for name in (
            "core.fsmonitor",
            "core.pager",
            "core.sshCommand",
            "core.editor",
            "core.gitProxy",
            "diff.external",
            "diff.evil.command",
            "diff.evil.textconv",
            "filter.evil.clean",
            "filter.evil.smudge",
            "filter.evil.process",
            "gpg.program",
            "pager.rev-list",
            "uploadpack.packObjectsHook",
            "credential.helper",
            "remote.origin.uploadpack",
        ):
            repo.git("config", name, str(program))
        for name, value in {
            "alias.rev-list": f"!{program}",
            "alias.cat-file": f"!{program}",
            "log.showSignature": "true",
            "protocol.allow": "always",
            "protocol.ext.allow": "always",
            "protocol.file.allow": "always",
        }.items():
            repo.git("config", name, value)
        hooks = repo.folder / ".git" / "hooks"
        hooks.mkdir(exist_ok=True)
        for hook in ("post-index-change", "reference-transaction", "fsmonitor-watchman"):
            shutil.copy(program, hooks / hook)
        trace.unlink(missing_ok=True)
        return trace.exists

    def test_nothing_is_run(self, repo, trap):
        edits, _ = read(repo)
        assert {e.path for e in edits} == {"a.md", "c.md"}
        assert not trap()

    def test_what_is_missing_is_not_fetched(self, repo, trap, tmp_path):
        """A partial clone's objects come from where the repository says, by a transport that may be a program."""
        for url in (f"ext::{tmp_path / 'evil'}", f"file://{tmp_path / 'repo'}", f"evil::{tmp_path}"):
            repo.git("config", "core.repositoryFormatVersion", "1")
            repo.git("config", "extensions.partialClone", "origin")
            repo.git("config", "remote.origin.promisor", "true")
            repo.git("config", "remote.origin.url", url)
            blob = repo.git("rev-parse", "HEAD:a.md").strip()
            (repo.folder / ".git" / "objects" / blob[:2] / blob[2:]).unlink(missing_ok=True)
            edits, history = read(repo)
            assert "a.md" not in {e.path for e in edits}
            assert {"not in this clone", "commit that git cannot read"} & set(history.skipped)
            assert not trap()

    def test_the_caller_s_environment_points_nowhere_else(self, repo, trap, monkeypatch, tmp_path):
        for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_OBJECT_DIRECTORY"):
            monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
        monkeypatch.setenv("GIT_EXTERNAL_DIFF", str(tmp_path / "evil"))
        assert len(read(repo)[0]) == 2
        assert not trap()
