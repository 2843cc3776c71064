"""The bars: an estimate that learns, a pace, the time left, and silence where there is no terminal."""

from types import SimpleNamespace

import pytest

from kvfix.bench.study import Progress
from kvfix.cli.bar import Bar
from kvfix.cli.output import Output
from kvfix.cli.study_bar import StudyBar
from kvfix.cli.survey import Line


@pytest.fixture
def out(monkeypatch):
    monkeypatch.setattr(Output, "draws", True)
    return Output()


def planned(name, num_chars):
    return Line("/docs", name, "planned", "new", num_chars=num_chars)


def finished(name, num_tokens):
    return Line("/docs", name, "built", record=SimpleNamespace(num_tokens=num_tokens))


def test_the_total_is_estimated_better_with_every_document(out):
    with Bar(out) as bar:
        bar.expect([planned("a.md", 400), planned("b.md", 400), Line("/docs", "c.md", "unchanged")])
        [task] = bar._progress.tasks
        assert (task.description, task.total) == ("0 of 2 documents", 200)
        bar.advance(50)
        assert task.fields["figures"] == "50 tokens"
        bar.advance(50)
        assert "a second" in task.fields["figures"]
        bar.done(finished("a.md", 200))
        assert (task.description, task.completed, task.total) == ("1 of 2 documents", 100, 400)


def test_documents_that_were_not_planned_do_not_count(out):
    with Bar(out) as bar:
        bar.expect([planned("a.md", 400)])
        bar.done(finished("c.md", 9))
        assert bar._progress.tasks[0].description == "0 of 1 documents"


def test_silent_elsewhere(capsys):
    with Bar(Output()) as bar:
        bar.expect([planned("a.md", 400)])
        bar.advance(50)
        bar.done(finished("a.md", 100))
    assert capsys.readouterr() == ("", "")


def test_a_studys_time_left_is_told_by_the_items_that_were_run(out, monkeypatch):
    moments = iter([100.0, 104.0])
    monkeypatch.setattr("kvfix.cli.study_bar.time.monotonic", lambda: next(moments))
    with StudyBar(out, 10) as bar:
        [task] = bar._progress.tasks
        bar.advance(Progress([], 1, 10))
        bar.advance(Progress([{}], 2, 10))
        assert task.fields["figures"] == "2 of 10"
        bar.advance(Progress([{}], 3, 10))
        assert task.fields["figures"] == "3 of 10, 28.0 s left"
        assert task.completed == 3


def test_a_studys_bar_is_silent_elsewhere(capsys):
    with StudyBar(Output(), 2) as bar:
        bar.advance(Progress([{}], 1, 2))
    assert capsys.readouterr() == ("", "")
