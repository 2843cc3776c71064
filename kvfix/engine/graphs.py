"""CUDA graphs of repair passes: a pass of so many rows is recorded once and replayed for any documents.

A pass over the rows of one repair reads every weight once and little else: some 25 launches a layer, which Python is
expected to take longer for than a GPU. The ops' kernels find documents through tables in memory (`FixedPack`), so one
recording serves all passes of its kind: a bucket of rows, a tiling. Rows that fill a bucket are written nowhere and see
nothing.

`torch.compile(mode="reduce-overhead")` is not what does this here. Its graphs copy every input that has no fixed
address into one and are skipped for functions that change their inputs (`cudagraph_utils.check_for_mutation`), which
is all that a repair does; it would stop at the cache, the attention function and the kernels' launches in each layer,
and compile at the first edit and anew for other lengths. What it would add is fusing norms, rotary embeddings and
activations, whose bytes are few beside those of the weights at these sizes.

What would break a recording: frequencies that follow from a text's length (LongRoPE and dynamic NTK decide that in
Python, so such models are left out), mixtures of experts whose eager code asks the device which experts were hit (that
raises; the grouped products that transformers takes by default do not), and masks (none is built under kvfix's
attention). The rest of a dense decoder's forward asks the device for nothing. Off unless KVFIX_CUDA_GRAPHS=1, until it
has been timed.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvfix.engine.attention import Pass
from kvfix.engine.cache import Rows
from kvfix.engine.recording import Graph, Record, Recording, farthest_apart, rows_of, write_rows
from kvfix.errors import UsageError, first_line
from kvfix.ops.fixed_pack import Kind
from kvfix.ops.positional_attention.plans import Call, calls_of

if TYPE_CHECKING:
    from kvfix.engine.engine import Engine

BUCKETS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024)
EAGER_PASSES = 2  # of a kind, before it is recorded: few edits pay for a recording
MOST_GRAPHS = 12
# a row's root mean square difference relative to its layer: products of more rows are summed in another order. Through
# 30 layers a window computed in two passes instead of one leaves 3e-6, 9e-3 and 4e-2, a wrong token 1.6
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2.0**-5, torch.bfloat16: 2.0**-3}

_failed: set[str] = set()  # why nothing is recorded or replayed in this process any more


class CudaRecorder:
    """Records work on a stream of its own, in memory that all graphs share: none of them keeps a result there."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def __call__(self, work: Callable[[], object]) -> Graph:
        others = torch.cuda.current_stream(self.device)
        # left in any case: `torch.cuda.graph` stays on the stream where a recording fails
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            self._warm_up(work, others)
            graph = torch.cuda.CUDAGraph()
            # other threads may copy finished caches meanwhile
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                work()
        return graph

    def _warm_up(self, work: Callable[[], object], others: torch.cuda.Stream) -> None:
        """What is compiled, loaded or allocated once must not be while recording."""
        self.stream.wait_stream(others)
        try:
            work()
        finally:
            others.wait_stream(self.stream)


def graphs_of(engine: Engine) -> Graphs | None:
    """An engine's graphs; None where they are not asked for, on a CPU, or where frequencies depend on a text's length.

    Raises `UsageError` for a KVFIX_CUDA_GRAPHS other than 0 and 1.
    """
    choice = os.environ.get("KVFIX_CUDA_GRAPHS") or "0"
    if choice not in ("0", "1"):
        raise UsageError(f"KVFIX_CUDA_GRAPHS={choice}: use 1 to record passes as CUDA graphs, or 0")
    fixed = not {"dynamic", "longrope"} & set(engine.positions.rope_types)
    wanted = choice == "1" and engine.device.type == "cuda" and fixed
    return Graphs(engine, CudaRecorder(engine.device)) if wanted else None


def _bring(this: Pass) -> None:
    """All layers of caches that are filled as a pass comes to them: a replay does not stop in between."""
    for rows in this.groups:
        for layer in range(rows.cache.num_layers):
            rows.cache.ready(layer)


class Graphs:
    """Runs passes, and records those kinds that come again."""

    def __init__(self, engine: Engine, record: Record) -> None:
        self.engine, self.record = engine, record
        self.calls: list[Call] = []  # what the model's layers ask of attention, known after its first pass
        self.passes: Counter[Kind] = Counter()  # eager ones
        self.kept: OrderedDict[Kind, Recording] = OrderedDict()  # the longest unused first

    def compute(self, this: Pass, ends: int) -> None:
        """`Engine.run_pass` of a pass without logits, by a recording where there is one."""
        if ends != self.engine.shape.layers - 1:
            self.engine.run_pass(this, ends)
            return
        kind = self._kind(this)
        if kind is not None and kind in self.kept:
            self.kept.move_to_end(kind)
            _bring(this)
            self.kept[kind].replay(this)
            return
        self.engine.run_pass(this, ends)
        self.calls = self.calls or calls_of(this.pack)
        if kind is not None:
            self.passes[kind] += 1
            if self.passes[kind] > EAGER_PASSES:
                self._keep(kind, this)

    def warm_up(self, num_rows: Sequence[int]) -> None:
        """Record what passes over so many rows of as many documents replay."""
        caches = [self.engine.new_cache(np.zeros(num + 1, np.int64)) for num in num_rows]
        for cache in caches:
            cache.keys.zero_()
            cache.values.zero_()
        # one more for what attention is asked for
        for _ in range(EAGER_PASSES + 2):
            # a first row that is left out makes it a repair
            self.engine.compute([Rows.at(cache, np.arange(1, len(cache))) for cache in caches])

    def _kind(self, this: Pass) -> Kind | None:
        """What a recording of this pass would be good for; None: this one is run as it is."""
        parts, num_rows = this.pack.parts, this.pack.starts[-1]
        if _failed or len({call.groups for call in self.calls}) != 1 or num_rows > BUCKETS[-1]:
            return None
        # the whole of one text is what PyTorch's causal attention is best at
        if parts[0].whole and len(parts) == 1:
            return None
        if any(type(rows) is not Rows or rows.key_positions is not None for rows in this.groups):
            return None
        bucket = next(size for size in BUCKETS if size >= num_rows)
        kind = Kind.of(this.pack, bucket, self.calls[0].groups)
        # what is recorded first is a text whose dims lie side by side
        return kind if kind.takes(this.pack) and kind.key_step == kind.value_step == 1 else None

    def _keep(self, kind: Kind, this: Pass) -> None:
        """Record, and compare with the rows that the pass has left; where that fails they stand, and no graph does."""
        expected = rows_of(this)
        try:
            recording = Recording(self.engine, kind, self.calls, self.record)
            # a replay that writes nothing shows
            write_rows(this, float("nan"))
            recording.replay(this)
            apart = farthest_apart(rows_of(this), expected)
            # NaN compares false
            if not apart <= TOLERANCE[self.engine.dtype]:
                raise ArithmeticError(f"a replayed pass differs from the same pass by {apart:.1e}")
        except Exception as error:  # whatever a library or a driver raises
            write_rows(this, expected)
            self._give_up(error)
        else:
            self.kept[kind] = recording
            if len(self.kept) > MOST_GRAPHS:
                gone, _ = self.kept.popitem(last=False)
                del self.passes[gone]

    def _give_up(self, error: Exception) -> None:
        _failed.add(type(error).__name__)
        self.kept.clear()
        warnings.warn(
            f"CUDA graphs are off from here on ({type(error).__name__}: {first_line(error)}); passes go on as before, "
            "more slowly. KVFIX_CUDA_GRAPHS=0 says so from the start",
            RuntimeWarning,
            stacklevel=4,
        )
