"""Pictures are drawn where there is something to see."""

import pytest

from kvfix.bench.plots import draw
from kvfix.bench.summary import summarise
from kvfix.errors import UsageError
from tests.bench.made import record

NAMES = [*"abcdefghij", "transplant:a"]


def study(*places, ks=(8, 32)):
    return summarise(
        [
            record(f"{condition}{distance}-{n}", name, condition=condition, distance=distance, k=k, mr=0.1 * n + k / 50)
            for condition, distance in places
            for n in range(3)
            for name in NAMES
            for k in ks
        ]
    )


def drawn(body, folder):
    return [path.name.removeprefix("made-012345-") for path in draw(body, folder)]


def test_all_three_in_both_formats(tmp_path):
    body = study(("direct", 0), ("derived", 0), ("distance", 0), ("distance", 250))
    expected = [f"{name}.{suffix}" for name in ("budget", "distance", "time") for suffix in ("png", "svg")]
    assert drawn(body, tmp_path / "new" / "plots") == expected
    for path in (tmp_path / "new" / "plots").iterdir():
        content = path.read_bytes()
        assert 5_000 < len(content) < 400_000
        assert content.startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
        if path.suffix == ".svg":
            text = content.decode()
            assert all(f">{name}<" in text for name in "abcdefghij")
            assert "margin recovery" in text
            assert "transplant" not in text


def test_the_same_study_gives_the_same_pictures(tmp_path):
    body = study(("direct", 0))
    one, other = (draw(body, tmp_path / name) for name in ("one", "other"))
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(one, other, strict=True))


def test_what_would_show_nothing_is_not_drawn(tmp_path):
    assert drawn(study(("direct", 0), ks=(8,)), tmp_path) == ["time.png", "time.svg"]
    assert drawn(study(ks=(8,)), tmp_path) == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write the pictures"):
        draw(study(("direct", 0)), tmp_path / "file" / "plots")
