"""Recorded passes: replayed for other documents they give the rows that the same passes give eagerly.

Without a GPU a "graph" does the recorded work again, kernels interpreted; what it reads is the same memory.
"""

from __future__ import annotations

import warnings
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvfix.core import KVCache
from kvfix.engine import Continuation, Engine, StaleEvidence, graphs, recording
from kvfix.engine.attention import Pass
from kvfix.engine.cache import Rows
from kvfix.engine.graphs import EAGER_PASSES, Graphs, graphs_of
from kvfix.errors import UsageError
from tests.engine.stale import ids_of, stale_of
from tests.ops.devices import DEVICE, LONG
from tests.tolerances import CACHE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the models of these tests lie on the CPU")

# windows and softcaps of each layer's own; then sinks and experts, partial and interleaved rotation
MODELS = ["gemma2", "llama", *(["gpt-oss", "phi3-partial", "glm-interleaved", "mixtral", "gpt2"] if LONG else [])]

Jobs = list[tuple[KVCache, np.ndarray]]


class Again:
    """Stands for a graph: replaying is doing the work again."""

    def __init__(self, work) -> None:
        self.work, self.replays = work, 0
        work()

    def replay(self) -> None:
        self.replays += 1
        self.work()


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Interpreted programs take milliseconds: few rows, and buckets to match."""
    monkeypatch.setattr(graphs, "_failed", set())
    monkeypatch.setattr(graphs, "BUCKETS", (4, 8, 12))


@pytest.fixture
def with_graphs(gated, monkeypatch):
    """`with_graphs(name)`: a zoo model's engine with graphs of its own; `record` stands for CUDA's."""

    def engine(name: str = "llama", record=Again, **settings) -> Engine:
        made = gated(name, **({"num_hidden_layers": 2} if name == "llama" else {}), **settings)
        # the gate needs no kernels, which are slow to interpret
        monkeypatch.setenv("KVFIX_OPS", "triton")
        monkeypatch.setitem(made.__dict__, "graphs", Graphs(made, record))
        return made

    return engine


def document(engine: Engine, num_tokens: int, seed: int) -> KVCache:
    """Random rows stand for stale ones."""
    cache = engine.new_cache(ids_of(num_tokens, seed), room=7)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (cache.keys, cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def jobs_of(engine: Engine, *sizes: tuple[int, int], seed: int = 0) -> Jobs:
    """Documents of so many tokens, and so many scattered rows of each."""
    made = []
    for number, (num_tokens, num_rows) in enumerate(sizes):
        rng = np.random.default_rng(seed + number)
        rows = np.sort(rng.choice(np.arange(1, num_tokens), num_rows, replace=False))
        made.append((document(engine, num_tokens, seed + number), rows))
    return made


def eager(engine: Engine, jobs: Jobs) -> Jobs:
    """Copies of the documents, their rows computed without a recording."""
    copies = [(KVCache(c.keys.clone(), c.values.clone(), c.token_ids, c.origin), rows) for c, rows in jobs]
    engine.run_pass(Pass([Rows.at(*job) for job in copies]))
    return copies


def assert_same(jobs: Jobs, expected: Jobs, tolerance: float = CACHE) -> None:
    """The rows within tolerance, all others bit for bit."""
    for (mine, rows), (theirs, _) in zip(jobs, expected, strict=True):
        for one, other in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            difference = (one.float() - other.float()).abs()
            # NaN compares false
            assert difference[:, :, rows].max() <= tolerance * max(1.0, float(other.abs().max()))
            difference[:, :, rows] = 0
            assert not difference.any()


def replays(engine: Engine) -> int:
    return sum(kept.graph.replays for kept in engine.graphs.kept.values())


@pytest.mark.parametrize("name", MODELS)
def test_replayed_for_other_documents(with_graphs, name):
    """One recording serves one document and several, longer and shorter ones, with more rows and fewer."""
    engine = with_graphs(name)
    engine.warm_up([6])
    assert replays(engine) == 1
    for seed, sizes in enumerate([[(90, 7)], [(200, 8)], [(60, 4), (90, 2), (41, 1)], [(50, 5)]]):
        jobs = jobs_of(engine, *sizes, seed=10 * seed)
        expected = eager(engine, jobs)
        engine.recompute_many(jobs)
        assert_same(jobs, expected)
    assert [kind.num_rows for kind in engine.graphs.kept] == [8]
    assert replays(engine) == 5


class Filled(KVCache):
    """A cache whose layers come when they are asked for."""

    def __init__(self, source: KVCache) -> None:
        empty = [torch.full_like(tensor, torch.nan) for tensor in (source.keys, source.values)]
        super().__init__(*empty, source.token_ids, source.origin)
        self.source = source

    def ready(self, layer: int) -> None:
        self.keys[layer], self.values[layer] = self.source.keys[layer], self.source.values[layer]


def test_layers_that_come_as_a_pass_reaches_them_are_there_before_a_replay(with_graphs):
    engine = with_graphs()
    engine.warm_up([3])
    jobs = jobs_of(engine, (20, 3))
    expected, before = eager(engine, jobs), replays(engine)
    coming = [(Filled(cache), rows) for cache, rows in jobs]
    engine.recompute_many(coming)
    assert replays(engine) == before + 1
    assert_same(coming, expected)


def test_half_precision(with_graphs):
    engine = with_graphs(dtype="bfloat16")
    engine.warm_up([6])
    jobs = jobs_of(engine, (90, 3), (80, 4))
    expected = eager(engine, jobs)
    before = replays(engine)
    engine.recompute_many(jobs)
    assert replays(engine) == before + 1
    assert_same(jobs, expected, 2.0**-6)


def test_a_first_edit_records_nothing(with_graphs):
    """The first pass tells what attention is asked for; passes of a kind count from the second on."""
    engine = with_graphs()
    for number in range(EAGER_PASSES + 1):
        engine.recompute_many(jobs_of(engine, (90, 7), seed=number))
        assert not engine.graphs.kept
    engine.recompute_many(jobs_of(engine, (90, 7)))
    assert replays(engine) == 1
    engine.recompute_many(jobs_of(engine, (70, 5)))
    assert replays(engine) == 2


def test_no_document_is_held(with_graphs):
    engine = with_graphs()
    engine.warm_up([6])
    jobs = jobs_of(engine, (90, 6))
    held = weakref.ref(jobs[0][0].keys)
    engine.recompute_many(jobs)
    assert replays(engine) == 2
    del jobs
    assert held() is None


def test_what_is_not_recorded(with_graphs, monkeypatch):
    """Prefills, texts behind a document, passes that end half-way or are listened to, and what PyTorch serves."""
    engine = with_graphs()
    engine.warm_up([6])
    monkeypatch.setenv("KVFIX_OPS", "auto")
    stale = stale_of(engine, "growing", room=40)
    monkeypatch.setenv("KVFIX_OPS", "triton")
    monkeypatch.setattr(graphs, "EAGER_PASSES", -1)
    (only,) = engine.graphs.kept.values()
    evidence = StaleEvidence(engine, stale.cache, stale.diff, stale.stored)
    evidence.deviation(1)
    evidence.query_attention((5, 6, 7))
    engine.prefill(ids_of(11))
    tried = Continuation(ids_of(3, 3).tolist(), ids_of(4, 4).tolist())
    list(engine.answer_logprobs(stale.cache, [tried, tried]))
    engine.recompute_many(jobs_of(engine, *[(9, 2)] * 5))
    engine.recompute_many(jobs_of(engine, (90, 13)))
    assert (list(engine.graphs.kept.values()), only.graph.replays) == ([only], 1)
    monkeypatch.setenv("KVFIX_OPS", "torch")
    monkeypatch.setattr(engine.graphs, "kept", {})
    monkeypatch.setattr(engine.graphs, "calls", [])
    for _ in range(EAGER_PASSES + 3):
        engine.recompute_many(jobs_of(engine, (90, 7)))
    assert not engine.graphs.kept


def test_a_bound_on_the_number_of_graphs(with_graphs, monkeypatch):
    """The one unused for longest goes, and has to earn its place again."""
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    engine = with_graphs()
    for num_rows in (3, 7, 3, 11):
        engine.warm_up([num_rows])
    assert [kind.num_rows for kind in engine.graphs.kept] == [4, 12]
    engine.recompute_many(jobs_of(engine, (90, 7)))
    assert [kind.num_rows for kind in engine.graphs.kept] == [4, 12]


# ---- what fails


class Broken(Again):
    def __init__(self, work) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand much more")


class Idle(Again):
    def replay(self) -> None:
        pass


class Deaf(Again):
    """Serves other rows than those that are loaded for it."""

    def __init__(self, work) -> None:
        super().__init__(work)
        engine, fixed = work.func.__self__, work.args[0]
        self.other = Pass([Rows.at(document(engine, 40, 1), np.arange(1, 8))])
        fixed.load(self.other)
        fixed.load = lambda this: None


class Wrong(Again):
    """A little more than rounding, in one row."""

    def replay(self) -> None:
        fixed = self.work.args[0]
        fixed.ids[0, 3] += 1
        super().replay()


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (Broken, r"RuntimeError: operation not permitted when stream is capturing\)"),
        (Idle, "differs from the same pass by nan"),
        (Deaf, "differs from the same pass by nan"),
        (Wrong, r"differs from the same pass by [0-9]"),
    ],
)
def test_one_warning_and_the_eager_rows_stand(with_graphs, record, said):
    engine = with_graphs(record=record)
    jobs = [jobs_of(engine, (90, 5), (60, 2), seed=number) for number in range(EAGER_PASSES + 4)]
    expected = [eager(engine, each) for each in jobs]
    for number, each in enumerate(jobs):
        if number == EAGER_PASSES + 1:
            with pytest.warns(RuntimeWarning, match=f"CUDA graphs are off from here on .*{said}") as warned:
                engine.recompute_many(each)
            assert len(warned) == 1
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                engine.recompute_many(each)
        assert_same(each, expected[number], 0.0)
    assert not engine.graphs.kept
    # for the process, whatever the engine
    another, this = Graphs(engine, Again), Pass([Rows.at(*job) for job in jobs[0]])
    another.calls = engine.graphs.calls
    assert another._kind(this) is None
    graphs._failed.clear()
    assert another._kind(this) is not None


def test_worse_than_any_other_row_counts(with_graphs):
    """NaN in one layer of one document is not passed over, and neither is one bad row among good ones."""
    engine = with_graphs()
    this = Pass([Rows.at(*job) for job in jobs_of(engine, (90, 5), (60, 2))])
    expected = recording.rows_of(this)
    assert recording.farthest_apart(recording.rows_of(this), expected) == 0
    cache = this.groups[0].cache
    cache.values[1, :, this.groups[0].slots[4]] *= 1.01
    assert 1e-3 < recording.farthest_apart(recording.rows_of(this), expected) < 1e-1
    cache.keys[0, 0, this.groups[0].slots[4], 3] = torch.nan
    assert np.isnan(recording.farthest_apart(recording.rows_of(this), expected))


# ---- CUDA's recorder, without CUDA


class Streams:
    """What the recorder calls of `torch.cuda`, noting in which order and on which stream."""

    def __init__(self) -> None:
        self.current, self.said = "default", []

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        # as in torch: a recording that fails leaves its stream the current one
        self.current = stream.name
        self.said.append(f"record, {pool}, {capture_error_mode}")
        yield
        self.said.append("recorded")

    def __getattr__(self, name):
        def waits(this, other) -> None:
            self.said.append(f"{this.name} waits for {other.name}")

        def named(name: str) -> type:
            return type("Stream", (), {"name": name, "wait_stream": waits})()

        known = {
            "graph_pool_handle": lambda: "a pool",
            "Stream": lambda device: named("side"),
            "current_stream": lambda device: named(self.current),
            "CUDAGraph": lambda: "a graph",
            "device": lambda device: nullcontext(),
        }
        return known[name]


@pytest.mark.parametrize("fails", [None, 1, 2])
def test_a_recording_is_warmed_up_and_its_stream_left(monkeypatch, fails):
    cuda = Streams()
    monkeypatch.setattr(torch, "cuda", cuda)
    recorder, done = graphs.CudaRecorder(torch.device("cuda")), []

    def work() -> None:
        done.append(cuda.current)
        cuda.said.append("work")
        if len(done) == fails:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError) if fails else nullcontext():
        assert recorder(work) == "a graph"
    assert cuda.current == "default"
    assert set(done) == {"side"}
    said = [
        "side waits for default",
        "work",
        "default waits for side",
        "record, a pool, thread_local",
        "work",
        "recorded",
    ]
    assert cuda.said == said[: {None: 6, 1: 3, 2: 5}[fails]]


# ---- whether at all


@pytest.mark.parametrize(
    ("told", "device", "name", "had"),
    [
        (None, "cuda", "llama", False),
        ("", "cuda", "llama", False),
        ("0", "cuda", "llama", False),
        ("1", "cuda", "llama", True),
        ("1", "cpu", "llama", False),
        ("1", "cuda", "llama-longrope", False),
        ("1", "cuda", "llama-dynamic", False),
        ("1", "cuda", "llama-llama3", True),
    ],
)
def test_who_has_graphs(gated, monkeypatch, told, device, name, had):
    monkeypatch.setattr(graphs, "CudaRecorder", lambda device: Again)
    monkeypatch.delenv("KVFIX_CUDA_GRAPHS", raising=False)
    if told is not None:
        monkeypatch.setenv("KVFIX_CUDA_GRAPHS", told)
    engine = SimpleNamespace(device=torch.device(device), positions=gated(name).positions)
    assert (graphs_of(engine) is not None) == had


def test_an_unknown_choice_is_named(gated, monkeypatch):
    monkeypatch.setenv("KVFIX_CUDA_GRAPHS", "yes")
    with pytest.raises(UsageError, match="KVFIX_CUDA_GRAPHS=yes: use 1"):
        graphs_of(gated("llama"))


def test_without_graphs_warming_up_does_nothing(gated):
    assert gated("llama").graphs is None
    gated("llama").warm_up([20])
