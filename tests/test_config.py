"""Settings: precedence, faults by name, and paths relative to the file."""

import subprocess
import sys

import pytest

from kvfix.config import FILE_NAME, Settings, find_config, load_settings
from kvfix.errors import UsageError


def write(directory, text):
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE_NAME
    path.write_text(text)
    return path


def test_defaults(tmp_path):
    settings = load_settings(start=tmp_path, environ={})
    assert settings == Settings()
    assert (settings.store, settings.model, settings.selector, settings.k) == ("cache_store", None, "linked", 32)
    assert settings.include == ("*.md", "*.markdown", "*.txt", "*.rst")
    assert (settings.on_low, settings.strategy, settings.lock_timeout) == ("exact", "auto", 10.0)


def test_precedence(tmp_path):
    write(tmp_path, "k = 1\nseed = 1\nbudget = 1\n")
    settings = load_settings({"k": 3, "budget": None}, tmp_path, environ={"KVFIX_K": "2", "KVFIX_SEED": "2"})
    assert (settings.k, settings.seed, settings.budget) == (3, 2, 1)


def test_every_setting_from_each_source(tmp_path):
    typed = {
        "store": "/s", "keep": 2, "model": "org/m", "device": "cuda:1", "dtype": "bfloat16", "template": "plain",
        "selector": "random", "k": 0, "budget": 5, "seed": 7, "query": "Who?", "strategy": "full",
        "include": ("*.md", "*.adoc"), "exclude": ("drafts",),
        "min_mr": 1.0, "on_low": "keep", "lock_timeout": 0.0, "max_bytes": 9, "memory": 5,
        "log_format": "json",
    }  # fmt: skip
    assert set(typed) == set(Settings.__dataclass_fields__)
    expected = Settings(**typed)
    as_toml = {name: list(value) if isinstance(value, tuple) else value for name, value in typed.items()}
    path = write(tmp_path, "\n".join(f"{name} = {value!r}" for name, value in as_toml.items()))
    as_text = {name: ", ".join(v) if isinstance(v, tuple) else str(v) for name, v in typed.items()}
    environ = {f"KVFIX_{name.upper()}": text for name, text in as_text.items()}
    assert load_settings(config_file=path, environ={}) == expected
    assert load_settings(start=tmp_path.parent, environ=environ) == expected
    assert load_settings(as_toml, tmp_path.parent, environ={}) == expected


def test_not_given(tmp_path):
    write(tmp_path, 'include = ["*.adoc"]')
    options = {"include": [], "exclude": (), "model": None}
    assert load_settings(options, tmp_path, environ={"KVFIX_K": ""}) == Settings(include=("*.adoc",))
    assert load_settings({"k": 0, "min_mr": 0.0}, tmp_path.parent, environ={}) == Settings(k=0, min_mr=0.0)


@pytest.mark.parametrize(
    ("given", "expected"), [("2GB", 2 * 10**9), ("1.5 GiB", 3 * 2**29), ("500mb", 5 * 10**8), ("7", 7), (9, 9)]
)
def test_a_size_is_a_number_of_bytes_wherever_it_is_given(tmp_path, given, expected):
    write(tmp_path, f"memory = {given!r}")
    assert load_settings(start=tmp_path, environ={}).memory == expected
    assert load_settings({"memory": given}, tmp_path.parent, environ={}).memory == expected
    assert load_settings({}, tmp_path.parent, environ={"KVFIX_MEMORY": str(given)}).memory == expected


def test_an_integer_is_a_number(tmp_path):
    write(tmp_path, "min_mr = 1\nlock_timeout = 3")
    settings = load_settings(start=tmp_path, environ={})
    assert [type(value) for value in (settings.min_mr, settings.lock_timeout)] == [float, float]


def test_the_nearest_file_is_found_upward(tmp_path):
    outer = write(tmp_path, "k = 1")
    inner = write(tmp_path / "a" / "b", "k = 2")
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir()
    (deep / "doc.md").write_text("x")
    assert find_config(deep) == find_config(deep / "doc.md") == inner
    assert find_config(tmp_path / "a") == outer
    assert load_settings(start=deep, config_file=outer, environ={}).k == 1


def test_the_working_directory_is_where_the_search_starts(tmp_path, monkeypatch):
    write(tmp_path, "k = 1")
    monkeypatch.chdir(tmp_path)
    assert load_settings(environ={}).k == 1


def test_relative_paths_in_the_file_are_relative_to_it(tmp_path, monkeypatch):
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.setenv("HOME", "/home/someone")

    def load(line, options=None, environ=None):
        write(tmp_path, line)
        return load_settings(options, tmp_path, environ=environ or {})

    assert load('store = "s"').store == str(tmp_path / "s")
    assert load('store = "/abs/s"').store == "/abs/s"
    assert load('store = "~/s"').store == "/home/someone/s"
    assert load('store = "s"', {"store": "here"}).store == "here"
    assert load('store = "s"', environ={"KVFIX_STORE": "there"}).store == "there"
    assert load('model = "models/tiny"').model == str(tmp_path / "models" / "tiny")
    assert load('model = "m.gguf"').model == str(tmp_path / "m.gguf")
    assert load('model = "org/name"').model == "org/name"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('k = "32"', "k = '32': expected a whole number, 0 or more"),
        ("k = -1", "k = -1: expected a whole number, 0 or more"),
        ('k = "all"', "k = 'all': expected a whole number, 0 or more, or adaptive"),
        ("k = true", "k = True: expected a whole number"),
        ("k = 1.0", "k = 1.0: expected a whole number"),
        ("max_bytes = 0", "expected a whole number, 1 or more"),
        ("memory = 0", "memory = 0: expected a size like 500MB or 2GB"),
        ("memory = true", "memory = True: expected a size"),
        ('memory = "much"', "memory = 'much': expected a size"),
        ("memory = -5", "memory = -5: expected a size"),
        ('on_low = "stop"', "on_low = 'stop': expected one of exact, keep, fail"),
        ('strategy = "fast"', "expected one of auto, repair, suffix, full"),
        ('dtype = "int8"', "expected one of auto, float32, bfloat16, float16"),
        ('device = "gpu"', "expected auto, cpu or cuda[:N]"),
        ('include = "*.md"', "include = '*.md': expected a list"),
        ("include = [1]", "include = [1]: expected a list"),
        ("min_mr = nan", "min_mr = nan: expected a number"),
        ("lock_timeout = -1", "expected a number of seconds"),
        ("lock_timeout = inf", "expected a number of seconds"),
        ('model = ""', "expected a text"),
        ("selecter = 1", "unknown key 'selecter'; did you mean selector?"),
        ("on-low = 1", "unknown key 'on-low'; did you mean on_low?"),
        ("[edit]\nk = 1", "unknown key 'edit'"),
        ("zzzzzz = 1", "unknown key 'zzzzzz'; known: store, model"),
        ("k = ", "not TOML"),
        (f"k = {'9' * 5000}", "not TOML"),
    ],
)
def test_faults_in_the_file_name_file_key_and_value(tmp_path, line, message):
    path = write(tmp_path, line)
    with pytest.raises(UsageError) as caught:
        load_settings(start=tmp_path, environ={})
    assert caught.value.message.startswith(f"{path}: ")
    assert message in caught.value.message
    assert caught.value.exit_code == 2


def test_rows_a_span_may_be_adaptive(tmp_path):
    write(tmp_path, 'k = "adaptive"')
    assert load_settings(start=tmp_path, environ={}).k == "adaptive"
    assert load_settings(start=tmp_path, environ={"KVFIX_K": "8"}).k == 8
    assert load_settings({"k": 9}, tmp_path, environ={"KVFIX_K": "adaptive"}).k == 9


def test_unreadable_files(tmp_path):
    with pytest.raises(UsageError, match="cannot read the configuration"):
        load_settings(config_file=tmp_path / "none.toml", environ={})
    (tmp_path / "bad.toml").write_bytes(b"# \x93")
    with pytest.raises(UsageError, match="not UTF-8 at byte 2"):
        load_settings(config_file=tmp_path / "bad.toml", environ={})


@pytest.mark.parametrize(
    ("options", "environ", "message"),
    [
        ({"k": -1}, {}, "--k -1: expected a whole number, 0 or more"),
        ({"on_low": "x"}, {}, "--on-low x: expected one of exact, keep, fail"),
        ({"kk": 1}, {}, "unknown option 'kk'"),
        ({}, {"KVFIX_K": "many"}, "KVFIX_K=many: expected a whole number"),
        ({}, {"KVFIX_MIN_MR": "nan"}, "KVFIX_MIN_MR=nan: expected a number"),
        ({}, {"KVFIX_ON_LOW": "x"}, "KVFIX_ON_LOW=x: expected one of"),
    ],
)
def test_faults_elsewhere_name_their_place(tmp_path, options, environ, message):
    with pytest.raises(UsageError) as caught:
        load_settings(options, tmp_path, environ=environ)
    assert caught.value.message.startswith(message)


def test_import_is_light():
    code = "import sys, kvfix.config; print(*{'pydantic', 'numpy', 'rapidfuzz', 'torch', 'tomllib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
