"""Generated items meet every filter, for words as tokens and for the demo model's tokenizer."""

import re
from dataclasses import asdict, replace
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest

from kvfix.bench.families import FAMILIES, IMPLICIT
from kvfix.bench.generate import GROUP, MAX_SPAN, Filler, Wanted, generate
from kvfix.bench.items import dump_items, load_items
from kvfix.diff import diff_tokens
from kvfix.engine import Engine
from kvfix.engine.locate import demo_file
from kvfix.engine.text import Text, make_template
from kvfix.errors import UnknownModelError, UsageError

BY_NAME = {family.name: family for family in (*FAMILIES, *IMPLICIT)}
HANDBOOK = Path(__file__).parents[2] / "corpora" / "handbook"
SYLLABLES = ("ba", "ko", "mu", "fi", "zo", "da", "gu", "pe")


class Words:
    """A tokenizer of words with the space before them; every other character is a token of its own."""

    bos_token_id = None
    bos_token = None

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def __call__(self, text: str | list[str], **settings: bool) -> dict:
        if isinstance(text, list):
            single = [self(one) for one in text]
            return {name: [one[name] for one in single] for name in ("input_ids", "offset_mapping")}
        found = list(re.finditer(r" ?\w+|.", text, re.DOTALL))
        return {
            "input_ids": [self.ids.setdefault(match[0], len(self.ids)) for match in found],
            "offset_mapping": [match.span() for match in found],
        }


def nonsense(seed: int, names: tuple[str, ...] = ()) -> str:
    """A document of a few paragraphs, in which the names come too."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(SYLLABLES, 3)) for _ in range(400)]
    parts = np.split(np.array(words, object), np.sort(rng.choice(400, 11, replace=False)))
    return "".join(" ".join([*part, *names]).capitalize() + ".\n\n" for part in parts if len(part))


@pytest.fixture(scope="module")
def text() -> Text:
    return Text(Words(), make_template("plain", None))


@pytest.fixture(scope="module")
def filler(text) -> Filler:
    """Some documents hold names that then may not be drawn."""
    names = ("boiler", "HOLBORN", "Amazon", "Botany", "Meridian", "lemon")
    return Filler([*map(nonsense, range(30)), *(nonsense(99 + n, (name,)) for n, name in enumerate(names))], text)


@pytest.fixture(scope="module")
def demo_text(user_cache) -> Text:
    """The demo model's tokenizer, without its weights."""
    with user_cache():
        try:
            demo_file()
        except UnknownModelError as error:
            pytest.skip(error.message)
        return Engine.open(None, device="cpu", dtype="float32").text


@pytest.fixture(scope="module")
def handbook(demo_text) -> Filler:
    return Filler([path.read_text(encoding="utf-8") for path in sorted(HANDBOOK.rglob("*.md"))], demo_text)


KINDS = {
    "direct": Wanted("direct", 10),
    "derived": Wanted("derived", 10),
    "development": Wanted("derived", 6, split="development"),
    "distance": Wanted("distance", 10, 250),
    "far": Wanted("distance", 5, 1500, context=4000),
    "chain": Wanted("chain", 10),
    "far chain": Wanted("chain", 5, 250),
    "implicit": Wanted("implicit", 10),
    "implicit development": Wanted("implicit", 4, 250, split="development"),
    "length": Wanted("direct", 10, variant="length"),
    "edits": Wanted("derived", 10, variant="edits"),
}


@pytest.fixture(scope="module", params=KINDS)
def made(request, text, filler):
    """All items of a kind, with what was wanted and the tokenizer."""
    wanted = KINDS[request.param]
    return wanted, text, list(generate(text, filler, wanted))


@pytest.fixture(scope="module", params=KINDS)
def demo_made(request, demo_text, handbook):
    wanted = KINDS[request.param]
    return wanted, demo_text, list(generate(demo_text, handbook, wanted))


def told(item, text: str) -> tuple[str, str]:
    """Subject and alias of the record in a text."""
    family = BY_NAME[item.family]
    aliases = family.aliases if item.condition != "implicit" else [alias for alias, _ in family.pairs]
    found = []
    for subject in family.subjects:
        head, tail = family.record.format(subject=subject, alias="\0").split("\0")
        for match in re.finditer(re.escape(head) + "(.{1,40}?)" + re.escape(tail), text):
            found.append((subject, match[1]))
    assert len(found) == 1
    assert all(word in (*aliases, "Upper", "Lower", "New", "Old", "Great", "Little") for word in found[0][1].split())
    return found[0]


def record_of(item, text: str) -> tuple[int, int]:
    """Where the record stands."""
    subject, alias = told(item, text)
    record = BY_NAME[item.family].record.format(subject=subject, alias=alias)
    return text.index(record), text.index(record) + len(record)


def check_filters(made):
    wanted, text, items = made
    assert len(items) == wanted.count
    for item in items:
        old, new = text.encode(item.before), text.encode(item.after)
        diff = diff_tokens(old.token_ids, new.token_ids)
        assert len(diff.spans) == (2 if wanted.variant == "edits" else 1)
        assert all(max(span.num_old, span.num_new) <= MAX_SPAN for span in diff.spans)
        assert (len(old.token_ids) == len(new.token_ids)) == (wanted.variant != "length")
        assert 0.25 <= diff.first / diff.num_new <= 0.40
        assert 0.98 * wanted.context <= diff.num_new <= wanted.context + 100
        assert (item.condition, item.distance, item.split) == (wanted.condition, wanted.distance, wanted.split)


def check_names(made):
    """Subject, aliases and values stand in the record and the rows and nowhere else, for upper and lower case."""
    wanted, _, items = made
    for item in items:
        family = BY_NAME[item.family]
        subject, old_alias = told(item, item.before)
        new_alias = told(item, item.after)[1]
        assert old_alias not in new_alias
        start, end = record_of(item, item.after)
        assert not re.search(re.escape(subject), item.after[:start] + item.after[end:], re.IGNORECASE)
        rows = item.after[end:]
        if wanted.condition == "implicit":
            assert all(name.lower() not in rows.lower() for name in (old_alias, new_alias))
            called = dict(family.pairs)
            assert family.row.format(called=called[old_alias], value=item.old.strip()) in rows
            assert family.row.format(called=called[new_alias], value=item.new.strip()) in rows
        else:
            row = family.first_row if wanted.condition == "chain" else family.row
            for alias, answer in ((old_alias, item.old), (new_alias, item.new)):
                assert len(re.findall(re.escape(alias), rows, re.IGNORECASE)) == 1
                is_value = wanted.condition not in ("direct", "chain")
                named = {"alias": alias, "value": answer.strip() if is_value else "\0", "middle": "\0"}
                assert re.search(re.escape(row.format(**named)).replace("\0", r"\w+"), rows)
        if wanted.condition == "direct":
            assert (item.old, item.new) == (f" {old_alias}", f" {new_alias}")
        else:
            values = (item.old.strip(), item.new.strip())
            assert set(values) <= set(family.values)
            assert all(len(re.findall(re.escape(v), item.after, re.IGNORECASE)) == 1 for v in values)


def check_places(made):
    """Where rows begin: behind the record, at the distance and at most half of it, or a paragraph, farther."""
    wanted, text, items = made
    for item in items:
        family = BY_NAME[item.family]
        end = record_of(item, item.after)[1]
        if wanted.distance:
            gap = len(text.plain_ids(item.after[end : item.after.index(family.heading, end)]))
            assert wanted.distance <= gap <= max(1.5 * wanted.distance, wanted.distance + 90)
        else:
            row = family.first_row if wanted.condition == "chain" else family.row
            assert item.after.startswith(row.split("{")[0], end)
            assert family.heading not in item.after
        if wanted.condition == "chain":
            rows = max(item.after.index(told(item, side)[1], end) for side in (item.before, item.after))
            second = item.after.index(family.second_heading, rows)
            assert len(text.plain_ids(item.after[rows:second])) >= max(wanted.distance, 200)
            assert item.after.index(item.new, second) > second
            assert item.after.index(item.old, second) > second


def check_question(made):
    for item in made[2]:
        family = BY_NAME[item.family]
        asked = family.direct if item.condition == "direct" else family.question
        assert item.question == asked.format(subject=told(item, item.after)[0])


CHECKS = [check_filters, check_names, check_places, check_question]


@pytest.mark.parametrize("check", CHECKS)
def test_items(made, check):
    check(made)


@pytest.mark.parametrize("check", CHECKS)
def test_items_of_the_demo_model(demo_made, check):
    check(demo_made)


def test_all_families_of_a_split_are_used_and_no_other(made):
    wanted, _, items = made
    pool = IMPLICIT if wanted.condition == "implicit" else FAMILIES
    names = [family.name for family in pool if family.holdout == (wanted.split == "holdout")]
    assert [item.family for item in items] == [names[n % len(names)] for n in range(wanted.count)]


def test_two_edits_of_two_records(text, filler):
    for item in generate(text, filler, KINDS["edits"]):
        diff = diff_tokens(text.encode(item.before).token_ids, text.encode(item.after).token_ids)
        first, second = (item.after[text.encode(item.after).offsets[span.new_start][0] :] for span in diff.spans)
        assert first.startswith(f" {told(item, item.after)[1]}")
        others = [f for f in FAMILIES if f.holdout and f.name != item.family]
        assert any(second.startswith(f" {alias}") for f in others for alias in f.aliases)
        assert item.new not in second, "behind the rows"


def test_items_can_be_written_and_read(text, filler, tmp_path):
    kinds = [Wanted("chain", 2), Wanted("chain", 2, 250), Wanted("distance", 2), Wanted("derived", 2)]
    kinds += [Wanted("derived", 2, variant="edits"), Wanted("derived", 2, seed=1), Wanted("derived", 2, context=900)]
    items = [item for wanted in kinds for item in generate(text, filler, wanted)]
    dump_items(tmp_path / "items.jsonl", items)
    assert load_items(tmp_path / "items.jsonl") == items


def test_no_distance_is_derived(text, filler):
    derived, near = (list(generate(text, filler, Wanted(name, 10))) for name in ("derived", "distance"))
    assert [replace(item, id="", condition="derived") for item in near] == [replace(item, id="") for item in derived]


def test_the_same_seed_gives_the_same_items(text, filler):
    first, again, other = (list(generate(text, filler, Wanted("derived", 10, seed=seed))) for seed in (3, 3, 4))
    assert first == again
    assert all(one.after != two.after for one, two in zip(first, other, strict=True))


def test_more_items_begin_with_the_fewer(text, filler):
    few, many = (list(generate(text, filler, Wanted("distance", count, 250))) for count in (3, 7))
    assert many[:3] == few


def test_neighbours_share_what_stands_before_their_records(text):
    filler = Filler([nonsense(seed) for seed in range(30)], text)
    heads = [item.after[: record_of(item, item.after)[0]] for item in generate(text, filler, Wanted("derived", 10))]
    assert len(set(heads)) == 2
    assert len(set(heads[:GROUP])) == 1


# ---- what cannot be made


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"condition": "dirct"}, "unknown condition 'dirct'; there are: direct, derived, distance, chain, implicit"),
        ({"variant": "longer"}, "unknown variant 'longer'; there are: same, length, edits"),
        ({"split": "test"}, "unknown split 'test'; there are: development, holdout"),
        ({"count": 0}, "count must be at least 1, not 0"),
        ({"distance": -1}, "distance must be at least 0, not -1"),
        ({"context": -5}, "context must be at least 1, not -5"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
        ({"condition": "implicit", "variant": "length"}, "implicit items have no variant length"),
    ],
)
def test_wrong_wishes(fields, message):
    with pytest.raises(UsageError) as caught:
        Wanted(**{"condition": "derived", "count": 1, **fields})
    assert message in caught.value.message


@pytest.mark.parametrize("texts", [[], [""], ["\n", " \n\n \n"]])
def test_a_filler_of_nothing(text, texts):
    with pytest.raises(UsageError, match="the filler holds no text"):
        Filler(texts, text)


def test_a_filler_of_long_paragraphs_alone(text):
    """Nothing of it would fit the end of a stretch."""
    with pytest.raises(UsageError, match="no paragraph of 90 tokens or fewer"):
        Filler(["word " * 200], text)


@pytest.mark.parametrize(("context", "distance"), [(60, 0), (200, 0), (400, 1000)])
def test_a_context_that_is_too_small(text, filler, context, distance):
    with pytest.raises(UsageError, match=f"no item of distance same fits {context} tokens of this filler"):
        list(generate(text, filler, Wanted("distance", 1, distance, context=context)))


def test_a_filler_that_names_everything(text):
    names = tuple(name for family in FAMILIES for name in family.subjects)
    with pytest.raises(UsageError, match="no item of derived same fits 1200 tokens of this filler"):
        list(generate(text, Filler([nonsense(1, names), "Short.\n"], text), Wanted("derived", 1)))


def test_windows_line_ends_in_the_filler(text):
    filler = Filler([nonsense(seed).replace("\n", "\r\n") for seed in range(30)], text)
    for item in generate(text, filler, Wanted("derived", 5)):
        assert "\r" not in item.after


# ---- families

NAMES = ("subjects", "aliases", "middles", "values")
TEXTS = ("record", "heading", "row", "question", "direct", "first_row", "second_heading", "second_row")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_text_of_a_family(family):
    assert all(len(set(getattr(family, names))) == len(getattr(family, names)) >= 6 for names in NAMES)
    for one, other in pairwise(map(set, ([n.lower() for n in getattr(family, names)] for names in NAMES))):
        assert not one & other
    for old, new in permutations(family.aliases, 2):
        fields = {"subject": family.subjects[0], "middle": family.middles[0], "value": family.values[0]}
        for name in TEXTS:
            said = [getattr(family, name).format(alias=alias, **fields) for alias in (old, new)]
            assert not set("{}") & set("".join(said)), name
            assert (said[0] != said[1]) == (name in ("record", "row", "first_row")), name
        assert old not in new, "an answer that holds the other shows nothing"
    for value, other in permutations(family.values, 2):
        assert value not in other


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_each_text_of_a_family_names(family):
    named = {name: set(re.findall(r"\{(\w+)\}", getattr(family, name))) for name in TEXTS}
    assert named == {
        "record": {"subject", "alias"},
        "heading": set(),
        "row": {"alias", "value"},
        "question": {"subject"},
        "direct": {"subject"},
        "first_row": {"alias", "middle"},
        "second_heading": set(),
        "second_row": {"middle", "value"},
    }


@pytest.mark.parametrize("family", [*FAMILIES, *IMPLICIT], ids=lambda family: family.name)
def test_a_familys_own_words_are_none_of_its_names(family):
    texts = [getattr(family, name, "") for name in TEXTS]
    said = set(re.findall(r"\w+", re.sub(r"\{\w+\}", " ", " ".join(texts)).lower()))
    aliases = getattr(family, "aliases", ()) or [alias for alias, _ in family.pairs]
    names = {name.lower() for name in (*family.subjects, *aliases, *family.values, *getattr(family, "middles", ()))}
    assert not said & names


@pytest.mark.parametrize("family", IMPLICIT, ids=lambda family: family.name)
def test_rows_of_an_implicit_family_describe(family):
    assert len({called for _, called in family.pairs}) >= 2
    for alias, called in family.pairs:
        assert alias.lower() not in family.row.format(called=called, value="x").lower()
        for field in asdict(family).values():
            if isinstance(field, str):
                said = field.format(subject="s", alias=alias, called=called, value="v")
                assert not set("{}") & set(said)


def test_splits_share_no_subject_and_no_text():
    for pool in (FAMILIES, IMPLICIT):
        sides = [[family for family in pool if family.holdout == flag] for flag in (False, True)]
        assert all(sides)
        for name in ("name", "record", "row", "question"):
            assert not {getattr(f, name) for f in sides[0]} & {getattr(f, name) for f in sides[1]}
        subjects = [{subject for family in side for subject in family.subjects} for side in sides]
        assert not subjects[0] & subjects[1]
    assert len({family.name for family in (*FAMILIES, *IMPLICIT)}) == len(FAMILIES) + len(IMPLICIT)
