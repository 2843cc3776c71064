"""Engine: encode, prefill, recompute, score and generate, on the model's own modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kvfix.core import KVCache, LayerRotation, ModelKey, Notify
from kvfix.engine import continuations, fingerprint, load, packed
from kvfix.engine.attention import NAME, Pass, running
from kvfix.engine.cache import EnoughError, PassCache, Rows
from kvfix.engine.continuations import Continuation
from kvfix.engine.graphs import Graphs, graphs_of
from kvfix.engine.locate import locate
from kvfix.engine.rope import PositionFacts, position_facts
from kvfix.engine.text import Encoding, Text, make_template
from kvfix.errors import DocumentError, UnsupportedModelError

CHUNK_ROWS = 2048


class CacheShape(NamedTuple):
    """Sizes of one document's cache."""

    layers: int
    heads: int  # key/value heads
    key_dim: int
    value_dim: int


class Engine:
    """A model with its tokenizer. Weights are loaded when they are first needed.

    `rotations` (one entry a layer) is what the gate found; until then, and for models whose keys do not simply
    turn with position, it is None.
    """

    def __init__(self, name: str, folder: Path | None, config: Any, tokenizer: Any, template: str = "auto") -> None:
        self.name = name
        self.folder = folder
        self.config = config
        self.text = Text(tokenizer, make_template(template, tokenizer))
        self.positions: PositionFacts = position_facts(config.get_text_config())
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.rotations: Sequence[LayerRotation] | None = None
        self.gate_report: dict[str, Any] | None = None

    @classmethod
    def open(
        cls,
        model: str | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        template: str = "auto",
        notify: Notify = lambda line: None,
    ) -> Engine:
        """Find a model (None: the demo model) and load its tokenizer; the weights follow when needed.

        Raises `UnknownModelError`, `UnsupportedModelError`, and `UsageError` for a device or dtype.
        """
        name, folder = locate(model, notify)
        if model is None and template == "auto":
            template = "plain"
        config = load.load_config(folder)
        engine = cls(name, folder, config, load.load_tokenizer(folder), template)
        engine.device = load.resolve_device(device)
        engine.dtype = load.resolve_dtype(dtype, config.get_text_config())
        return engine

    @classmethod
    def of_model(cls, model: Any, tokenizer: Any, name: str = "a model in memory") -> Engine:
        """An engine of a causal model that is in memory already; the model asks kvfix for attention from then on.

        It has no key: what it computes can be compared and timed, not stored.
        """
        engine = cls(name, None, model.config, tokenizer, "plain")
        engine.device, engine.dtype = model.device, model.dtype
        engine.__dict__["_loaded"] = (model, load.adopt(model.eval().requires_grad_(False)))
        return engine

    # ---- identity

    @cached_property
    def key(self) -> ModelKey:
        """What caches of this engine are valid for."""
        if self.folder is None:
            raise ValueError("an engine made of a model in memory has no key")
        template = self.text.template
        return ModelKey(
            name=self.name,
            weights=fingerprint.weights_digest(self.folder),
            config=fingerprint.config_digest(self.folder),
            adapter=fingerprint.adapter_digest(self.folder),
            tokenizer=fingerprint.tokenizer_digest(self.folder),
            dtype=self.dtype_name,
            rope=fingerprint.rope_text(self.folder),
            prefix=tuple(self.text.prefix),
            template="\0".join((template.before, template.between, template.after)),
        )

    @property
    def dtype_name(self) -> str:
        """As users write it: `float32`, `bfloat16` or `float16`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def backend(self) -> str:
        """Device kind, library versions and layout of the weights: what a gate's findings hold for."""
        import transformers

        layout = "-packed" if packed.packs(self.device, self.dtype) else ""
        return f"{self.device.type}-torch{torch.__version__}-transformers{transformers.__version__}{layout}"

    def describe(self) -> dict[str, str]:
        """Name, key, dtype and device, for reports."""
        key, device = self.key.fingerprint, str(self.device)
        return {"name": self.name, "fingerprint": key, "dtype": self.dtype_name, "device": device}

    @property
    def movable(self) -> bool:
        """Whether stored rows may move: False once the gate has found that keys do not simply turn."""
        return self.rotations is not None or self.gate_report is None

    @property
    def noise_nats(self) -> float:
        """What the gate has measured of rounding in a log-probability; 0 before it has run."""
        return (self.gate_report or {}).get("noise", {}).get("nats", 0.0)

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def free_bytes(self) -> int | None:
        """What may still be put on the device; None for the CPU, whose memory is everybody's."""
        if self.device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(self.device)
        # what the allocator keeps for us counts as taken there
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    # ---- the model

    @cached_property
    def _loaded(self) -> tuple[Any, str]:
        if self.folder is None:
            raise ValueError("an engine made of a model in memory was given none")
        return load.load_model(self.folder, self.dtype, self.device)

    @property
    def model(self) -> Any:
        """The causal language model."""
        return self._loaded[0]

    @property
    def default_attention(self) -> str:
        """The attention that the model uses by itself."""
        return self._loaded[1]

    @cached_property
    def _decoder(self) -> Any:
        return self.model.get_decoder()

    @cached_property
    def _cache_keyword(self) -> str:
        """transformers renamed `past_key_values` to `cache`."""
        parameters = inspect.signature(type(self._decoder).forward).parameters
        return "cache" if "cache" in parameters else "past_key_values"

    @contextmanager
    def plain_attention(self) -> Iterator[None]:
        """For comparisons: the model as it is by itself."""
        self.model.set_attn_implementation(self.default_attention)
        try:
            yield
        finally:
            self.model.set_attn_implementation(NAME)

    @torch.inference_mode()
    def plain_forward(self, token_ids: np.ndarray, cache: Any = None) -> Any:
        """The model's own forward pass without logits, behind `cache`; returns its cache. Use in `plain_attention`."""
        from transformers import DynamicCache

        cache = DynamicCache() if cache is None else cache
        ids = torch.from_numpy(np.asarray(token_ids))[None].to(self.device)
        self._decoder(input_ids=ids, use_cache=True, **{self._cache_keyword: cache})
        return cache

    @cached_property
    def shape(self) -> CacheShape:
        """Sizes of a cache, read off a pass over one token."""
        with self.plain_attention():
            layers = self.plain_forward(np.array([0])).layers
        shapes = {(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in layers}
        if len(shapes) != 1:
            raise UnsupportedModelError(f"{self.name}: its layers' keys differ in shape: {sorted(shapes)}")
        return CacheShape(len(layers), *shapes.pop())

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in all layers, keys and values."""
        layers, heads, key_dim, value_dim = self.shape
        return layers * heads * (key_dim + value_dim) * self.dtype.itemsize

    # ---- text

    def encode(self, text: str) -> Encoding:
        """Prefix and document tokens. Raises `DocumentError` when the model cannot take that many."""
        encoding = self.text.encode(text)
        self.require_fit(len(encoding.token_ids))
        return encoding

    def require_fit(self, num_tokens: int) -> None:
        """Raise `DocumentError` when `num_tokens` exceed the model's context."""
        limit = self.positions.max_tokens
        if limit is not None and num_tokens > limit:
            raise DocumentError(f"{num_tokens} tokens, but {self.name} takes at most {limit}; split the document")

    # ---- caches

    def new_cache(self, token_ids: np.ndarray, room: int = 0) -> KVCache:
        """An empty cache for these tokens, with `room` rows behind them."""
        layers, heads, key_dim, value_dim = self.shape
        capacity = len(token_ids) + room
        keys = torch.empty(layers, heads, capacity, key_dim, dtype=self.dtype, device=self.device)
        values = torch.empty(layers, heads, capacity, value_dim, dtype=self.dtype, device=self.device)
        # masked room must hold numbers: 0 · NaN is NaN
        keys[:, :, len(token_ids) :] = 0
        values[:, :, len(token_ids) :] = 0
        return KVCache(keys, values, np.asarray(token_ids, np.int64), np.arange(len(token_ids)))

    def prefill(
        self, token_ids: np.ndarray, *, room: int = 0, progress: Callable[[int], None] = lambda rows: None
    ) -> KVCache:
        """A fresh cache of the whole text, computed in chunks where the model's positions allow it."""
        self.require_fit(len(token_ids))
        cache = self.new_cache(token_ids, room)
        self.recompute(cache, np.arange(len(token_ids)), progress=progress)
        return cache

    def prefill_many(self, texts: Sequence[np.ndarray], *, room: int = 0) -> list[KVCache]:
        """Fresh caches of several texts from one packed pass; no row sees another text."""
        caches = [self.new_cache(ids, room) for ids in texts]
        self.recompute_many([(cache, np.arange(len(cache))) for cache in caches])
        return caches

    def recompute(
        self, cache: KVCache, positions: np.ndarray, *, progress: Callable[[int], None] = lambda rows: None
    ) -> None:
        """The repair operator R: recompute the rows at `positions` (ascending) from the cache's tokens, in place.

        Layer by layer each row attends to the cache's rows at positions up to its own: fresh where they are
        recomputed too, as they stand elsewhere. Every other row is left bit for bit. Source: arXiv 2609.17983.
        """
        step = len(positions) if self.takes_one_pass(len(cache), len(positions)) else CHUNK_ROWS
        for start in range(0, len(positions), max(1, step)):
            chunk = positions[start : start + step]
            self.compute([Rows.at(cache, chunk)])
            progress(len(chunk))

    def recompute_many(self, jobs: Sequence[tuple[KVCache, np.ndarray]]) -> None:
        """`recompute` for several documents in one forward pass, but for those that need passes of their own."""
        packed = [len(jobs) > 1 and not self._one_pass(cache) for cache, _ in jobs]
        self.compute([Rows.at(*job) for job, shares in zip(jobs, packed, strict=True) if shares and len(job[1])])
        for job, shares in zip(jobs, packed, strict=True):
            if not shares:
                self.recompute(*job)

    def takes_one_pass(self, num_tokens: int, num_rows: int) -> bool:
        """Whether so many rows of a text are recomputed at once."""
        return num_rows <= CHUNK_ROWS or self.positions.crosses(num_tokens, num_tokens)

    @cached_property
    def graphs(self) -> Graphs | None:
        """Recorded passes, where they are asked for and can be had."""
        return graphs_of(self)

    def warm_up(self, num_rows: Sequence[int]) -> None:
        """Record now what passes over so many rows of as many documents replay; without CUDA graphs nothing is done."""
        if self.graphs is not None:
            self.graphs.warm_up(num_rows)

    def _one_pass(self, cache: KVCache) -> bool:
        """Beyond LongRoPE's limit all rows must share one call, which decides the frequencies."""
        return self.positions.crosses(len(cache), len(cache))

    # ---- the model's forward, called for kvfix nowhere else

    @torch.inference_mode()
    def compute(self, groups: list[Rows]) -> None:
        """One pass over the rows of all groups, in place, that ends where the last layer has its keys and values.

        The caches may hold a model's lower layers only; all of one pass hold equally many.
        """
        if groups:
            run: Callable[..., object] = self.run_pass if self.graphs is None else self.graphs.compute
            run(Pass(groups), ends=groups[0].cache.num_layers - 1)

    @torch.inference_mode()
    def run_pass(self, this: Pass, ends: int | None = None) -> list[int]:
        """A given pass, up to the keys and values of layer `ends` (None: to the end of the decoder).

        Returns the layers that stored rows, in order.
        """
        inputs, cache = self._inputs(this, ends)
        with running(this), suppress(EnoughError):
            self._decoder(**inputs)
        return cache.updated

    @torch.inference_mode()
    def logits(self, groups: list[Rows], rows: list[int]) -> torch.Tensor:
        """One pass, and logits `[len(rows), V]` of these rows (counted through all groups)."""
        this = Pass(groups)
        inputs, _ = self._inputs(this)
        with running(this):
            return self.model(**inputs, logits_to_keep=torch.tensor(rows, device=self.device)).logits[0]

    def _inputs(self, this: Pass, ends: int | None = None) -> tuple[dict[str, Any], PassCache]:
        ids, positions = this.inputs(self.device)
        cache = PassCache(this.groups, this.pack, ends, this.backend)
        inputs = {"input_ids": ids, "position_ids": positions, "use_cache": True, self._cache_keyword: cache}
        return inputs, cache

    # ---- continuations behind a document

    def require_room(self, cache: KVCache, num_rows: int) -> None:
        """Raise `DocumentError` when `num_rows` more tokens exceed the model's context, or void the document's keys."""
        limit = self.positions.limit_behind(len(cache))
        if limit is not None and len(cache) + num_rows > limit:
            takes = "takes" if limit == self.positions.max_tokens else "takes before its frequencies change"
            raise DocumentError(
                f"{len(cache)} tokens of document and {num_rows} of question and answer exceed "
                f"the {limit} that {self.name} {takes}"
            )

    def answer_logprobs(self, cache: KVCache, tried: Sequence[Continuation]) -> Iterator[torch.Tensor]:
        """Log-probabilities `[T, V]` (fp32, CPU) at each answer's T positions; the cache's rows stay as they are.

        Computed a batch at a time, as they are asked for.
        """
        return self.answer_logprobs_of([(cache, continuation) for continuation in tried])

    def answer_logprobs_of(self, jobs: Sequence[tuple[KVCache, Continuation]]) -> Iterator[torch.Tensor]:
        """`answer_logprobs` for several documents, packed into as few passes as their rooms allow."""
        return continuations.answer_logprobs(self, jobs)

    def generate(self, cache: KVCache, queries: Sequence[list[int]], max_new: int = 16) -> list[list[int]]:
        """Greedy continuations of several queries, each behind the document; the cache's rows stay as they are."""
        return self.generate_of([(cache, query) for query in queries], max_new)

    def generate_of(self, jobs: Sequence[tuple[KVCache, list[int]]], max_new: int = 16) -> list[list[int]]:
        """`generate` for several documents, one pass a step for all that fit their rooms together."""
        return continuations.generate(self, jobs, max_new)

    @cached_property
    def stop_ids(self) -> set[int]:
        """Tokens that end a continuation."""
        given = getattr(self.model.generation_config, "eos_token_id", None)
        given = self.text.tokenizer.eos_token_id if given is None else given
        return set(given if isinstance(given, list) else [given]) - {None}
