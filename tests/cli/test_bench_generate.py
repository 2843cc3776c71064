"""kvfix bench items --generate: an items file for one tokenizer, and what stands in its way."""

import pytest

from kvfix.bench.items import load_items
from kvfix.engine import Engine


@pytest.fixture
def filler(tmp_path):
    """Short paragraphs: with a byte a token even a sentence is long."""
    folder = tmp_path / "filler"
    folder.mkdir()
    for n in range(12):
        parts = [f"Babako {n} mufi zo dagu pekoda {m} gu." for m in range(20)]
        (folder / f"{n}.md").write_text("\n\n".join(parts) + "\n")
    return folder


@pytest.fixture
def write(kvfix, model, filler):
    """Generate three development items unless told otherwise."""

    def call(*arguments, items="items.jsonl", conditions="derived"):
        given = ("--generate", conditions, "--items", items, "--filler", filler, "--model", model, "--device", "cpu")
        return kvfix("bench", "items", *given, "--split", "development", "--count", 3, "--context", 3000, *arguments)

    return call


def test_writes_items_that_can_be_loaded(write, tmp_path):
    result = write()
    assert (result.code, result.out) == (0, "")
    assert "wrote 3 items to items.jsonl" in result.err
    items = load_items(tmp_path / "items.jsonl")
    assert [item.family for item in items] == ["registry", "accounts", "catalogue"]
    assert {item.condition for item in items} == {"derived"}


def test_prints_one_document(write, tmp_path):
    result = write("--json")
    assert result.code == 0
    assert result.json == {"schema": "kvfix.generate/1", "items": "items.jsonl", "num_items": 3}


def test_every_kind_at_every_distance(write, tmp_path):
    """Conditions without a distance come once."""
    result = write("--distances", "0,200", conditions="derived, distance,chain,implicit,derived")
    assert result.code == 0, result.err
    items = load_items(tmp_path / "items.jsonl")
    kinds = dict.fromkeys((item.condition, item.distance) for item in items)
    far = [(name, distance) for name in ("distance", "chain", "implicit") for distance in (0, 200)]
    assert list(kinds) == [("derived", 0), *far]
    assert len(items) == 7 * 3


def test_the_seed_decides(write, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert write("--item-seed", seed, items=f"{name}.jsonl").code == 0
    texts = [(tmp_path / f"{name}.jsonl").read_text() for name in "abc"]
    assert texts[0] == texts[1] != texts[2]


def test_what_is_there_is_not_overwritten(write, tmp_path):
    (tmp_path / "items.jsonl").write_text("mine")
    result = write()
    assert result.code == 2
    assert "items.jsonl is there already" in result.err
    assert (tmp_path / "items.jsonl").read_text() == "mine"


def test_a_folder_is_made(write, tmp_path):
    assert write(items="new/folder/items.jsonl").code == 0
    assert len(load_items(tmp_path / "new/folder/items.jsonl")) == 3


@pytest.mark.parametrize("left_out", ["--items", "--filler"])
def test_file_and_filler_are_needed(kvfix, filler, left_out):
    given = {"--items": "items.jsonl", "--filler": filler}
    del given[left_out]
    result = kvfix("bench", "items", "--generate", "derived", *(part for pair in given.items() for part in pair))
    assert result.code == 2
    assert "--generate needs --items FILE.jsonl to write, and --filler DIR" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--generate", "dirct"), "unknown condition 'dirct'"),
        (("--generate", ""), "unknown condition ''"),
        (("--variant", "longer"), "unknown variant 'longer'"),
        (("--split", "test"), "unknown split 'test'"),
        (("--distances", "x"), "--distances x: expected whole numbers"),
        (("--distances", "-5"), "--distances -5: expected whole numbers"),
        (("--count", "0"), "--count"),
        (("--count", "many"), "--count"),
        (("--context", "100"), "--context"),
        (("--item-seed", "-1"), "--item-seed"),
        (("--generate", "implicit", "--variant", "length"), "implicit items have no variant length"),
        (("--filler", "nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_done_is_said_before_a_model_is_loaded(write, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(Engine, "open", lambda *given, **more: pytest.fail("opened a model"))
    result = write(*arguments)
    assert result.code == 2
    assert message in result.err
    assert not (tmp_path / "items.jsonl").exists()


def test_a_filler_of_nothing(write, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    result = write("--filler", bare)
    assert (result.code, "no documents here" in result.err) == (2, True)
    (bare / "empty.md").write_text("\n\n")
    result = write("--filler", bare)
    assert (result.code, "the filler holds no text" in result.err) == (2, True)


def test_nothing_is_written_where_one_kind_cannot_be_made(write, tmp_path):
    result = write("--distances", "0,5000", conditions="distance")
    assert result.code == 2
    assert "no item of distance same fits 3000 tokens of this filler" in result.err
    assert not (tmp_path / "items.jsonl").exists()
