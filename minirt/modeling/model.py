"""`Model`: a list of layers run in order, each bound to one implementation."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from minirt.device import AbsentGPU, is_gpu, on_device
from minirt.errors import ConfigError, UnsupportedError
from minirt.layers import Layer, LayerContext, Select, implementation
from minirt.layers.base import BUILT_IN, Implementation, has_implementation
from minirt.modeling.config import ModelConfig, RopeConfig
from minirt.modeling.formats import FormatChoice
from minirt.modeling.parameters import Parameter, Shard
from minirt.modeling.plan import Plan, PlanRow, not_capturable, parse_impl
from minirt.step.batch import Batch
from minirt.step.kv_cache import CacheSpec, KVCache, LayerCache
from minirt.wording import worded_place

CANNOT = "auto: triton cannot: "  # how a row of the plan begins to say why a layer is eager


class Model:
    """Layers in order, each bound to one implementation: `model(batch, cache)` → logits [R, V] fp32.

    A layer object that appears more than once has one set of weights, and a cache for each place. Inserts a `Select` after the
    last attention layer or `Tap` (the last layer with a `cache_spec`, or that needs every row) unless the list has one. `formats`
    sets the formats of the linear layers; if a tied head is quantized, its weights are a separate copy.

    `shard`: the model is that rank's share of one that several GPUs compute together.

    `draft_layers`: those of a draft model, which continues from the hidden states of a `Tap` among `layers`. It is `draft_model`.
    This model's weights, cache specs and plan include those of the draft model, and weights that both have are shared.
    """

    ranks: Any = None  # `minirt.parallel.ranks.Ranks`, of a shard; None: there is one rank
    adapters: Any = None  # `minirt.adapters.adapters.Adapters`; None: requests have none

    def __init__(
        self, config: ModelConfig, layers: Sequence[Layer], formats: FormatChoice | None = None,
        draft_layers: Sequence[Layer] = (), shard: Shard | None = None,
    ) -> None:  # fmt: skip
        self.config, self.layers, self.formats = config, in_order(config, layers), formats
        self.draft_model = Model(config, draft_layers, formats, shard=shard) if draft_layers else None
        self._first_cache = 0  # of the cache specs of a draft model, among those of its target
        if self.draft_model is not None:
            self.draft_model._first_cache = sum(layer.cache_spec is not None for layer in self.layers)
        if formats is not None:
            for layer in self.layers:
                for weights in layer.quantizable():
                    head, tied = layer is self.layers[-1], config.tie_word_embeddings
                    weights.format = formats.format_of(weights.modules, head=head, tied=tied) or weights.format
        if shard is not None:
            for layer in {id(layer): layer for layer in self.layers}.values():
                layer.shard(shard)
        seen: dict[tuple[Any, ...], Parameter] = {}
        for layer in self.unique_layers():
            for parameter in list(layer.parameters()):
                name = next(iter(parameter.expected()))[0]
                key = name, parameter.format, parameter.compile_key()  # some rows of a weight are another parameter
                layer.share(seen.setdefault(key, parameter), parameter)
        self.device, self.dtype, self.kv_dtype, self.max_model_len = torch.device("meta"), torch.float32, torch.float32, 0
        self.batch_invariant = False
        self.plan = Plan((), "meta", "the layers have no implementation yet")

    def unique_layers(self) -> Iterator[Layer]:
        """All layers, each once; last, those of the draft model."""
        yield from {id(layer): layer for model in self._models for layer in model.layers}.values()

    @property
    def _models(self) -> "tuple[Model, ...]":
        return (self,) if self.draft_model is None else (self, self.draft_model)

    def parameters(self) -> Iterator[Parameter]:
        """All weights, each once."""
        yield from {id(p): p for layer in self.unique_layers() for p in layer.parameters()}.values()

    @property
    def cache_specs(self) -> list[CacheSpec]:
        """The cache specs of the layers that have one, in order; last, those of the draft model."""
        return [layer.cache_spec for model in self._models for layer in model.layers if layer.cache_spec is not None]

    @property
    def num_parameters(self) -> int:
        return sum(p.num_parameters for p in self.parameters())

    @property
    def decode_read_bytes(self) -> int:
        """Weight bytes that a decode step of one token reads: those of each layer, once for each place in the list, without those
        of the draft model."""
        return sum(layer.decode_read_bytes(self.dtype) for layer in self.layers)

    def keep_undo(self, tokens: int) -> None:
        """Have recurrent layers keep what undoes steps of at most `tokens` tokens. Call it before a cache is made."""
        for layer in self.layers:
            layer.context.undoable = tokens

    @property
    def step_state_bytes(self) -> int:
        """Bytes of the states of one sequence that a decode step reads and writes, summed over all layers."""
        return sum(layer.step_state_bytes for layer in self.layers)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all weights in a model of this dtype."""
        return sum(p.nbytes(dtype) for p in self.parameters())

    @property
    def ropes(self) -> Sequence[tuple[RopeConfig, int]]:
        """The rotary tables of all layers, each once: (rope, rotated channels of a head)."""
        return list(dict.fromkeys(table for layer in self.layers for table in layer.ropes))

    def rope_bytes(self, length: int) -> list[int]:
        """Bytes of each rotary table of `length` positions, and of the factors of q that belong to it."""
        return [4 * length * (rotary_dim + bool(rope.query_scaling_beta)) for rope, rotary_dim in self.ropes]

    def uses(self, implementation: str) -> bool:
        """Whether any layer runs this implementation."""
        return any(row.implementation == implementation for row in self.plan.rows)

    @property
    def capturable(self) -> bool:
        """Whether small steps can be captured in CUDA graphs; if not, `plan.not_capturable` says why."""
        return self.plan.not_capturable is None

    def allocate(self, device: torch.device, dtype: torch.dtype, max_model_len: int, kv_dtype: torch.dtype | None = None) -> None:
        """Reserve memory for all weights, and create the context that the layers share, with the rope tables.

        Args:
            max_model_len: number of positions of the rope tables.
            kv_dtype: dtype of the KV pages; None: the model's.
        """
        for model in self._models:
            model.device, model.dtype, model.kv_dtype, model.max_model_len = device, dtype, kv_dtype or dtype, max_model_len
        for parameter in self.parameters():
            parameter.allocate(device, dtype)
        shared = LayerContext(max_model_len, device, self.kv_dtype, dtype)
        shared.invariant = self.batch_invariant
        shared.reduction = None if self.ranks is None else self.ranks.reduction
        for layer in self.unique_layers():
            layer.context = shared
        for rope, rotary_dim in self.ropes:
            shared.rope(rope, rotary_dim)
            shared.query_scales(rope)

    def reserve_splits(self, max_splits: int) -> None:
        """Reserve memory for the partial results of `max_splits` KV splits. Call it before CUDA graphs are captured."""
        for layer in self.unique_layers():
            layer.reserve(max_splits)

    def row_maxima_tiles(self, rows: int) -> int:
        """Number of row maxima per row that the head stores for `rows` rows of logits; 0: none."""
        return self.layers[-1].row_maxima_tiles(rows)

    def resolve(self, impl: str | Sequence[str] = "auto") -> Plan:
        """Choose and bind every layer's implementation, once. See `parse_impl` for the form of `impl`."""
        default, rules = parse_impl(impl)
        for layer in self.unique_layers():
            # Also in a model without weights, which is only planned.
            layer.context.dtype, layer.context.kv_dtype, layer.context.invariant = self.dtype, self.kv_dtype, self.batch_invariant
        dtype, rows = str(self.dtype).removeprefix("torch."), list[PlanRow]()
        bound: dict[int, tuple[str, str]] = {}
        counted: set[int] = set()
        for pattern, name in rules:
            if not any(fnmatchcase(layer.name, pattern) for layer in self.unique_layers()):
                names, expected = some_names(list(self.unique_layers())), "a name or glob such as 'layers.*.mlp'"
                raise UnsupportedError("matches no layer", where=f"--impl {pattern}={name}", expected=expected, found=names)
        for layer in (layer for model in self._models for layer in model.layers):
            wanted, why = default, "the default" if default == "auto" else worded_place(f"--impl {default}")
            for pattern, name in rules:
                if fnmatchcase(layer.name, pattern):
                    wanted, why = name, worded_place(f"--impl {pattern}={name}")
            if id(layer) not in bound:
                bound[id(layer)] = self._bind(layer, wanted, why)
            first_used = [p for p in layer.parameters() if id(p) not in counted]
            counted.update(map(id, first_used))
            size = sum(p.nbytes(self.dtype) for p in first_used)
            formats = tuple(sorted({weights.format.name for weights in layer.parameters() if weights.format}))
            capturable = implementation(layer.kind, bound[id(layer)][0]).capturable
            rows.append(PlanRow(layer.name, layer.kind, *bound[id(layer)], dtype, formats, size, capturable))
        checkpoint, notes = (self.formats.checkpoint, self.formats.notes) if self.formats else (None, ())
        device, size = str(self.device), self.num_parameters
        reason, sharded = not_capturable(rows, device), any(p.sharded for p in self.parameters())
        self.plan = Plan(tuple(rows), device, reason, checkpoint, notes, self.config.model_type, size, sharded)
        return self.plan

    def _bind(self, layer: Layer, wanted: str, why: str) -> tuple[str, str]:
        if wanted == "auto":
            wanted, why = self._automatic(layer)
        try:
            chosen = implementation(layer.kind, wanted)
        except UnsupportedError as error:
            hint = "a file may register it, with minirt.user_code.import_file or `minirt serve --import FILE`; all ranks run it"
            raise error.changed(where=why, hint=hint) from error
        reason = chosen.unsupported(layer, self.device)
        if reason is not None:
            raise UnsupportedError(f"{wanted} cannot run {layer.name}: {reason}", where=why)
        if self.batch_invariant:
            _check_invariance(layer, chosen, why)
        if not isinstance(self.device, AbsentGPU):  # there, Triton would be imported for nothing, and need not be installed
            layer.bind(chosen if self.ranks is None else self.ranks.checked(chosen))
        return wanted, why

    def _automatic(self, layer: Layer) -> tuple[str, str]:
        if not is_gpu(self.device):
            return "eager", f"auto: the device is {self.device.type}"
        if not has_implementation(layer.kind, "triton"):
            return "eager", "auto: no triton implementation"
        reason = implementation(layer.kind, "triton").unsupported(layer, self.device)
        return ("triton", "auto") if reason is None else ("eager", f"{CANNOT}{reason}")

    @torch.inference_mode()
    def __call__(self, batch: Batch, cache: KVCache) -> Tensor:
        """Logits of a batch."""
        return self._run(self._with_cache(cache), batch)

    @torch.inference_mode()
    def dry_run(self, batch: Batch, cache: KVCache) -> None:
        """Run one layer for each compile key and implementation. Together they launch every kernel of the model, and of the draft
        model.

        Layers after `Select` have another number of rows, so they are run separately.
        """
        with nullcontext() if self.ranks is None else self.ranks.reduction.paused():
            self._dry_run(batch, cache)

    def _dry_run(self, batch: Batch, cache: KVCache) -> None:
        firsts: dict[tuple[Any, ...], tuple[Layer, LayerCache | None]] = {}
        selected = False
        for layer, kv in self._with_cache(cache):
            # For other implementations, it is not known on what their kernels depend.
            key = (layer.implementation, layer.compile_key()) if layer.implementation in BUILT_IN else (id(layer),)
            firsts.setdefault((selected, *key), (layer, kv))
            selected = selected or layer.selects_rows
        logits = self._run(firsts.values(), batch)
        if self.draft_model is not None:
            tokens, rows, size = batch.num_tokens, len(batch.logits_indices), self.config.hidden_size
            hidden, taps = (torch.empty(n, size, dtype=self.dtype, device=self.device) for n in (tokens, rows))
            self.draft_model.dry_run(replace(batch, hidden=hidden, taps=taps, logits=None, row_maxima=None), cache)
        del logits  # as in a step, they are in memory while the draft model runs

    def _with_cache(self, cache: KVCache) -> list[tuple[Layer, LayerCache | None]]:
        kept = iter(cache.layers[self._first_cache :])
        return [(layer, None if layer.cache_spec is None else next(kept)) for layer in self.layers]

    def _run(self, layers: Iterable[tuple[Layer, LayerCache | None]], batch: Batch) -> Tensor:
        with on_device(self.device) if self.device.type == "cuda" else nullcontext():
            batch = batch if batch.input_ids.device == self.device else batch.to(self.device)
            x = torch.empty(0, device=self.device)
            for layer, kv in layers:
                x = layer(x, batch, kv)
            if batch.logits is not None and x.data_ptr() != batch.logits.data_ptr():  # the head did not write to `logits`
                x = batch.logits.copy_(x)
        return x


def _check_invariance(layer: Layer, chosen: Implementation, why: str) -> None:
    """Refuse a layer whose results may depend on what else a step computes. why: this implementation was chosen."""
    if not chosen.batch_invariant:
        what = f"{layer.name}: implementation {chosen.name!r} ({why}) cannot be batch-invariant"
        expected = "Triton's layers on a GPU, or layers that declare it"
        raise UnsupportedError(what, where="--batch-invariant", expected=expected)


def in_order(config: ModelConfig, layers: Iterable[Layer]) -> list[Layer]:
    """The layers, checked, with a `Select` inserted after the last layer that needs every row, unless there is one."""
    if not isinstance(layers, Iterable):
        raise ConfigError("a model needs layers", expected="a sequence of layers", found=type(layers).__name__)
    layers = list(layers)
    for number, layer in enumerate(layers):
        if not isinstance(layer, Layer) or not isinstance(getattr(layer, "kind", None), str):
            expected = "a minirt.layers.Layer with a kind"
            raise ConfigError("not a layer", where=f"layers[{number}]", expected=expected, found=type(layer).__name__)
        place = f"layers[{number}], {layer.name}"
        if layer.cache_spec is not None:
            _check_cache_spec(layer.cache_spec, place)
        if layer.context.device.type != "meta":
            raise ConfigError("this layer already belongs to a model", where=place, hint="make new layers for each model")
    ends = [(layer.reads_tokens, layer.makes_logits) for layer in layers]
    if len(layers) < 2 or ends != [(True, False), *[(False, False)] * (len(layers) - 2), (False, True)]:
        order = "one embedding first, then residual layers, at most one select after the last attention, one head last"
        expected = "reads_tokens is true of the first layer only, makes_logits of the last layer only"
        kinds = ", ".join(layer.kind for layer in layers) or "no layers"
        raise ConfigError(f"a model needs {order}", expected=expected, found=kinds)
    needing = [i for i, layer in enumerate(layers) if i == 0 or layer.cache_spec is not None or layer.needs_every_row]
    selects, behind = [i for i, layer in enumerate(layers) if layer.selects_rows], needing[-1] + 1
    hint = "leave it out: the model inserts one after the last attention"
    if len(selects) > 1:
        what = f"there are two select layers; layers[{selects[0]}] is the first"
        raise ConfigError(what, where=f"layers[{selects[1]}]", hint=hint)
    if selects and selects[0] < behind:
        what = "attention or a tap after a select layer would lack rows"
        raise ConfigError(what, where=f"layers[{selects[0]}]", expected=f"a place after layers[{behind - 1}]", hint=hint)
    return layers if selects else [*layers[:behind], Select(config), *layers[behind:]]


def _check_cache_spec(spec: object, place: str) -> None:
    if isinstance(spec, type) or not isinstance(spec, CacheSpec):
        kind = f"the class {spec.__name__}" if isinstance(spec, type) else type(spec).__name__
        expected = "a PagesSpec, StateSpec or CombinedSpec, or another CacheSpec"
        raise ConfigError("not a cache spec", where=place, expected=expected, found=kind)
    try:
        hash(spec)
    except TypeError as error:
        expected = "a frozen dataclass or a named tuple, of values that can be hashed"
        raise ConfigError("the cache spec cannot be hashed", where=place, expected=expected, found=str(error)) from error


def some_names(layers: Sequence[Layer]) -> str:
    """Names of layers for a message; of many layers, only the first and last ones."""
    names = [layer.name for layer in layers]
    return ", ".join(names if len(names) <= 8 else [*names[:3], "…", *names[-3:]])


