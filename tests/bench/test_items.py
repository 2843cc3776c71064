"""Items files: what is wrong is said with file, line and field."""

import json
from dataclasses import asdict, replace

import pytest

from kvfix.bench.items import dump_items, load_items
from kvfix.errors import UsageError
from tests.bench.made import draft

GOOD = {name: value for name, value in asdict(draft(1)).items() if value is not None}


@pytest.fixture
def loaded(tmp_path):
    """Load a file of these lines, objects or text."""

    def load(*lines):
        path = tmp_path / "items.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return load_items(path)

    return load


def test_what_is_dumped_is_loaded(tmp_path):
    items = [draft(1), replace(draft(2), family="refunds", split="test")]
    dump_items(tmp_path / "items.jsonl", items)
    assert load_items(tmp_path / "items.jsonl") == items
    assert "family" not in (tmp_path / "items.jsonl").read_text().splitlines()[0]


def test_blank_lines_and_a_byte_order_mark_are_passed_over(tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_bytes(b"\xef\xbb\xbf\n" + json.dumps(GOOD).encode() + b"\n\n")
    assert load_items(path) == [draft(1)]


@pytest.mark.parametrize("answer", ["old", "new"])
def test_one_answer_may_be_empty(loaded, answer):
    assert getattr(loaded({**GOOD, answer: ""})[0], answer) == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "expected a JSON object"),
        ({**GOOD, "qestion": "?"}, "unknown field 'qestion'"),
        ({name: value for name, value in GOOD.items() if name != "before"}, "field 'before' is missing"),
        ({**GOOD, "distance": "0"}, "field 'distance' must be a whole number of tokens, not \"0\""),
        ({**GOOD, "distance": True}, "field 'distance' must be a whole number"),
        ({**GOOD, "distance": -1}, "field 'distance' must be a whole number"),
        ({**GOOD, "id": 7}, "field 'id' must be a string, not 7"),
        ({**GOOD, "condition": "dirct"}, "field 'condition' must be one of direct, derived, distance, chain, implicit"),
        ({**GOOD, "question": ""}, "field 'question' is empty"),
        ({**GOOD, "before": "\ud800"}, "field 'before' holds half a surrogate pair"),
        ({**GOOD, "family": 3}, "field 'family' must be a string"),
        ({**GOOD, "after": GOOD["before"]}, "fields 'before' and 'after' are the same"),
        ({**GOOD, "new": GOOD["old"]}, "fields 'old' and 'new' are the same"),
    ],
)
def test_faults_name_file_line_and_field(loaded, tmp_path, line, message):
    with pytest.raises(UsageError) as caught:
        loaded({**GOOD, "id": "first"}, "", line)
    assert caught.value.message.startswith(f"{tmp_path / 'items.jsonl'}:3: ")
    assert message in caught.value.message


def test_an_id_comes_once(loaded):
    with pytest.raises(UsageError, match=r":2: field 'id': 'made-1' has come before"):
        loaded(GOOD, GOOD)


def test_files_that_cannot_be_read(tmp_path, loaded):
    with pytest.raises(UsageError, match="holds no items"):
        loaded("", " ")
    with pytest.raises(UsageError, match="cannot read the items file: No such file"):
        load_items(tmp_path / "nowhere.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "caf\xe9"}')
    with pytest.raises(UsageError, match="not UTF-8 at byte 11"):
        load_items(tmp_path / "latin.jsonl")
