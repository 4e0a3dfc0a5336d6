"""`prepared`: kernels whose launches skip most of Triton's host work, which takes longer than a small kernel runs.

`JITFunction.run` finds the compiled kernel from the specialization of all arguments, checks global values and hooks, and encodes
every TMA descriptor anew. A prepared kernel lets Triton do this once for each specialization. Then it keeps the C function that
Triton calls, with the arguments that do not change. Later launches compute a cheaper key and call it.

The key distinguishes everything that Triton's specialization does: device, types, dtypes, addresses that are multiples of 16,
integers that are 1 or multiples of 16, constexprs and launch options. `JITFunction.run` launches what it does not cover: an
integer that is negative or has more than 31 bits, an argument of another type, a launch hook. Only that path checks global
values, which are constants, and notices a CPU tensor.

An argument may be a record, that is a NamedTuple of tensors, numbers, bools, texts and None: kernels read its fields by name.
Its bools, texts and Nones are compile-time constants, and so are all fields of a class with `compile_time`. Records do not nest,
and TMA descriptors are separate arguments, because Triton 3.6 passes neither. Kernels do not annotate a record of constants as a
constexpr: Triton 3.6 would read Python's numbers from it, which it does not take for constants everywhere.

Instead of Triton's version, what Triton passes to its C function is recorded and compared with what is expected. If it differs, a
warning says so, once, and from then on Triton launches what is not prepared yet.
"""

import copy
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver
from triton.tools.tensor_descriptor import TensorDescriptor

from minirt.device import interpreting
from minirt.wording import warn

by_triton: ContextVar[bool] = ContextVar("by_triton", default=False)  # whether this thread's launches are Triton's
_INTERPRETING = interpreting()  # Triton asks when it imports a kernel
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion")  # that are handed on without a dictionary
_ABSENT = object()  # their value if they are not given
_MOST_MAPS = 1024  # encoded TMA descriptors that a compiled kernel keeps
_state = {"usable": True}


class Tile:
    """A shape of tiles that TMA moves: rows × columns, for Gluon kernels with their layout in shared memory.

    Args:
        make: makes Triton's descriptor.
        width: of the matrix as which a contiguous tensor is seen. None: it is a matrix. The view is made only when a descriptor
            is encoded, because it takes long on the host.
    """

    def __init__(self, make: Callable[..., Any], block: list[int], *layout: Any, width: int | None = None) -> None:
        self._make, self._block, self._layout, self._width = make, block, layout, width

    def descriptor(self, tensor: Tensor) -> Any:
        """Triton's `TensorDescriptor` of a matrix."""
        if self._width is not None:
            tensor = tensor.view(-1, self._width)
        return self._make(tensor, self._block, *self._layout)


class Tiled(NamedTuple):
    """A matrix, as `tile` sees it, that a kernel gets as a TMA descriptor. It is encoded at the launch, unless it is known."""

    tensor: Tensor
    tile: Tile


def tiled(tensor: Tensor, rows: int, columns: int) -> Any:
    """The argument of a kernel, not of Gluon, that gets `tensor` as a TMA descriptor for tiles of rows × columns."""
    tile = _tile(rows, columns)
    return tile.descriptor(tensor) if _INTERPRETING else Tiled(tensor, tile)


@functools.cache
def _tile(rows: int, columns: int) -> Tile:
    return Tile(TensorDescriptor.from_tensor, [rows, columns])


class _Launch(NamedTuple):
    """How a compiled kernel is launched.

    Args:
        launch: Triton's C function. It takes the grid, the stream, `constants`, and the kernel's arguments.
        constants: what it takes between the stream and the kernel's arguments.
        nested: whether it takes the kernel's arguments as one tuple.
        maps: for each known TMA descriptor, the arguments that the kernel gets for it.
        encode: encodes the descriptors among a call's arguments, and adds them to `maps`.
    """

    launch: Callable[..., None]
    constants: tuple[Any, ...]
    nested: bool
    maps: dict[Hashable, tuple[Any, ...]]
    encode: Callable[[tuple[Any, ...]], list[tuple[Any, ...]]]


class PreparedKernel(JITFunction):
    """A `JITFunction` whose `kernel[grid](...)` launches what is prepared, and prepares what is not."""

    _entry: Callable[..., None]  # made at the first launch

    @property
    def cache_key(self) -> str:
        """Triton's digest of the kernel's source and of all functions that it calls. Theirs are made first: in Triton 3.6, the
        digest else depends on which other kernels had one before, so that no process found what another had compiled."""
        if self.hash is None:
            _make_cache_keys(self, set())
        return super().cache_key

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        try:
            entry = self._entry
        except AttributeError:
            entry = self._entry = _entry(self)
        return functools.partial(entry, grid)

    def _by_triton(
        self, grid: Any, arguments: tuple[Any, ...], options: dict[str, Any], launches: dict[Any, _Launch | None], key: Any,
    ) -> None:  # fmt: skip
        """Launch by Triton, and prepare the next launch with this key. key None: it is not covered."""
        real = tuple(map(_for_triton, arguments))
        compiled = self.run(*real, grid=grid, warmup=False, **options)
        if key is None or compiled is None or key in launches or by_triton.get() or not _state["usable"]:
            return
        try:
            launches[key] = _prepare(compiled, arguments)
        except Exception as error:  # private parts of Triton are missing, or are others
            _state["usable"] = False
            why = f"Triton {triton.__version__} is not as expected ({type(error).__name__}: {error})"
            warn(f"kernels are launched by Triton, which takes longer: {why}", RuntimeWarning)


def _make_cache_keys(function: JITFunction, known: set[int]) -> None:
    """Make the digests of all functions that `function` calls, the innermost first. `known`: ids of those that have one."""
    names, scope = function.fn.__code__.co_names, function.fn.__globals__
    modules = [vars(value) for name in names if isinstance(value := scope.get(name), ModuleType)]
    for callee in (space.get(name) for space in (scope, *modules) for name in names):
        if isinstance(callee, JITFunction) and id(callee) not in known:
            known.add(id(callee))
            _make_cache_keys(callee, known)
            callee.cache_key  # noqa: B018  (reading the attribute makes it)


_CONSTANTS: set[type] = set()
RecordType = TypeVar("RecordType", bound=type)


def compile_time(record: RecordType) -> RecordType:
    """Decorator of a NamedTuple whose fields are compile-time constants of kernels."""
    _CONSTANTS.add(record)
    return record


def _is_record(kind: type) -> bool:
    return issubclass(kind, tuple) and kind is not Tiled


def _for_triton(argument: Any) -> Any:
    """What Triton takes for an argument: a descriptor, or a record in which constants are marked."""
    kind = type(argument)
    if kind is Tiled:
        return argument.tile.descriptor(argument.tensor)
    if not _is_record(kind):
        return argument
    every = kind in _CONSTANTS
    return kind._make(triton.language.constexpr(a) if every or type(a) in (str, bool) else a for a in argument)


class _Interpreted:
    """An interpreted kernel. The interpreter makes tensors of a tuple's numbers, so records of constants become other objects."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def plain(argument: Any) -> Any:
            return SimpleNamespace(**argument._asdict()) if type(argument) in _CONSTANTS else argument

        def launch(*arguments: Any, **keywords: Any) -> None:
            self._kernel[grid](*map(plain, arguments), **{name: plain(value) for name, value in keywords.items()})

        return launch


def prepared(kernel: Any) -> Any:
    """Decorator of a kernel that the host launches, above `triton.jit` or `gluon.jit`."""
    if not isinstance(kernel, JITFunction):
        return _Interpreted(kernel)
    prepared_class = _class(type(kernel))  # type: ignore[arg-type]  # mypy takes types for unhashable
    return prepared_class(
        kernel.fn, do_not_specialize=kernel.do_not_specialize,
        do_not_specialize_on_alignment=kernel.do_not_specialize_on_alignment, noinline=kernel.noinline, debug=kernel.debug,
    )  # fmt: skip


@functools.cache
def _class(base: type) -> Any:
    return type(PreparedKernel.__name__, (PreparedKernel, base), {})


def _entry(kernel: PreparedKernel) -> Callable[..., None]:
    """The function behind `kernel[grid]`: it binds the arguments and calls the launch function of their types."""
    parameters = kernel.signature.parameters.values()
    names = [p.name for p in parameters]
    runtime = [name for name, p in zip(names, kernel.params, strict=True) if not p.is_constexpr]
    by_types: dict[tuple[type, ...], Callable[..., None]] = {}

    def of_types(types: tuple[type, ...]) -> Callable[..., None]:
        kinds = dict(zip(runtime, types, strict=True))
        records = [name for name, kind in kinds.items() if _is_record(kind) and kind not in _CONSTANTS]
        by_types[types] = _by_fields(kernel, kinds, records) if records else _launch_function(kernel, kinds)
        return by_types[types]

    defaults = {f"_default_{p.name}": p.default for p in parameters if p.default is not p.empty}
    bound = [name if f"_default_{name}" not in defaults else f"{name}=_default_{name}" for name in names]
    bound += [f"{name}=_absent" for name in _OPTIONS]
    source = f"""
def entry(_grid, {", ".join(bound)}, **_options):
    _types = ({"".join(f"type({name}), " for name in runtime)})
    (_by_types.get(_types) or _of_types(_types))(_grid, {_passed(kernel)})
"""
    return _compiled(source, "entry", {"_by_types": by_types, "_of_types": of_types, "_absent": _ABSENT} | defaults)


def _passed(kernel: PreparedKernel) -> str:
    """The names of what generated functions hand on: a kernel's arguments, `_OPTIONS`, and a dictionary of other options."""
    return ", ".join([*kernel.signature.parameters, *_OPTIONS, "_options"])


def _given(values: tuple[Any, ...], others: dict[str, Any]) -> dict[str, Any]:
    """The options of a launch, from those of `_OPTIONS` and the others."""
    return {name: value for name, value in zip(_OPTIONS, values, strict=True) if value is not _ABSENT} | others


def _by_fields(kernel: PreparedKernel, kinds: dict[str, type], records: list[str]) -> Callable[..., None]:
    """The function that reads the records' fields and calls the launch function of their types, which takes them, too."""
    fields = {name: _fields(name, len(kinds[name]._fields)) for name in records}  # type: ignore[attr-defined]
    every = [field for names in fields.values() for field in names]
    by_types: dict[tuple[type, ...], Callable[..., None]] = {}

    def of_types(types: tuple[type, ...]) -> Callable[..., None]:
        remaining = iter(types)
        of_fields = {name: tuple(next(remaining) for _ in names) for name, names in fields.items()}
        by_types[types] = _launch_function(kernel, {**kinds, **of_fields}, every)
        return by_types[types]

    read = "".join(f"    {', '.join(names)}, = {name}\n" for name, names in fields.items())
    source = f"""
def by_fields(_grid, {_passed(kernel)}):
{read}    _types = ({"".join(f"type({field}), " for field in every)})
    (_by_types.get(_types) or _of_types(_types))(_grid, {_passed(kernel)}, {", ".join(every)})
"""
    return _compiled(source, "by_fields", {"_by_types": by_types, "_of_types": of_types})


def _fields(name: str, count: int) -> list[str]:
    """Names of the fields of the record `name` in generated functions."""
    return [f"{name}_{i}_" for i in range(count)]


class _Arguments:
    """The source lines that turn arguments into the values of Triton's C function, and their parts of a launch's key."""

    def __init__(self) -> None:
        self.lines, self.key, self.pointers = list[str](), list[str](), list[str]()
        self.integers, self.tiles = list[str](), list[str]()

    def value(self, name: str, kind: type | None, at: int, specialized: bool) -> str | None:
        """What is passed for the argument `name` of type `kind` (None: a constexpr). None: the type is not covered.

        `at`: place of the parameter. `specialized`: whether Triton specializes an integer.
        """
        if kind is None or kind is str or kind in _CONSTANTS:
            self.key.append(name)  # like Triton, it takes 1 and True for equal
        elif kind in (Tensor, torch.nn.Parameter):
            self.lines.append(f"{name}_ptr_ = {name}.data_ptr()")
            self.pointers.append(f"{name}_ptr_")
            self.key.append(f"{name}.dtype")
            return f"{name}_ptr_"
        elif kind is int:
            self.integers.append(name)
            if specialized:
                self.key.append(f"2 if {name} == 1 else {name} & 15 == 0")
        elif kind is Tiled:
            self.lines.append(f"{name}_of_ = {name}.tensor")
            self.lines.append(f"{name}_is_ = ({at}, {name}_of_.data_ptr(), {name}_of_.shape, {name}_of_.stride())")
            self.tiles.append(name)
            self.key += [f"{name}.tile", f"{name}_of_.dtype"]
            return f"*{name}_map_"
        elif kind not in (type(None), float, bool):  # Triton does not specialize values of these types
            return None
        return name

    def record(self, name: str, kinds: tuple[type, ...]) -> str | None:
        """What is passed for a record with fields of these types. None: a type is not covered."""
        fields = zip(_fields(name, len(kinds)), kinds, strict=True)
        # A bool of a record is a constant, as a constexpr is.
        known = ((field, None if kind is bool else kind) for field, kind in fields)
        values = [None if kind is Tiled else self.value(field, kind, 0, True) for field, kind in known]
        return None if None in values else f"({', '.join(map(str, values))},)"


def _launch_function(
    kernel: PreparedKernel, types: Mapping[str, type | tuple[type, ...]], fields: Sequence[str] = ()
) -> Callable[..., None]:
    """The function that launches a kernel with arguments of these types. A loop over the arguments would take far longer.

    Args:
        types: those of the parameters that are no constexprs; of a record, the types of its fields.
        fields: names of the fields of all records, which the function takes after the arguments and the options.
    """
    arguments, values = _Arguments(), list[str]()
    for at, (name, parameter) in enumerate(zip(kernel.signature.parameters, kernel.params, strict=True)):
        kind = types.get(name)
        if isinstance(kind, tuple):
            value = arguments.record(name, kind)
        else:
            value = arguments.value(name, kind, at, not parameter.do_not_specialize)
        if value is None:
            count, end = len(kernel.params), len(kernel.params) + len(_OPTIONS)
            return lambda grid, *rest: kernel._by_triton(grid, rest[:count], _given(rest[count:end], rest[end]), {}, None)
        values.append(value)
    lines, key, pointers = arguments.lines, arguments.key, arguments.pointers
    integers, tiles = arguments.integers, arguments.tiles
    everything = f"({', '.join(kernel.signature.parameters)},)"
    aligned = ["_aligned = True"]
    if pointers:
        each = "".join(f"{name} & 15 == 0, " for name in pointers)
        aligned = [f"_aligned = ({each}) if ({' | '.join(pointers)}) & 15 else True"]
    covered = f"({' | '.join(integers)}) >> 31 == 0" if integers else "True"
    maps = "".join(f"{name}_map_, " for name in tiles)
    known = "".join(f"_maps[{name}_is_], " for name in tiles)
    encoded = [f"try: {maps} = {known}", f"except KeyError: {maps} = _encode({everything})"] if tiles else []
    passed, hooks = ", ".join(values), [f"_runtime.launch_{at}_hook" for at in ("enter", "exit")]
    hooked = " or ".join(f"((_hook := {hook}) is not None and getattr(_hook, 'calls', True))" for hook in hooks)
    lines += [
        *aligned, "_driver = driver.active", "_device = _driver.get_current_device()",
        f"_key = (_device, _aligned, {', '.join([*key, *_OPTIONS])}, tuple(_options.items()) if _options else None)",
        "_ready = _launches.get(_key)", f"if _ready is None or not ({covered}) or _by_triton.get() or _hooks or {hooked}:",
        f"    _given_options = _given(({', '.join(_OPTIONS)}), _options)",
        f"    return _kernel._by_triton(_grid, {everything}, _given_options, _launches, _key if {covered} else None)",
        "if len(_grid) == 1: _x, _y, _z = _grid[0], 1, 1", "else: _x, _y, _z = _grid if len(_grid) == 3 else (*_grid, 1)",
        "_launch, _constants, _nested, _maps, _encode = _ready", *encoded, "_stream = _driver.get_current_stream(_device)",
        f"if _nested: _launch(_x, _y, _z, _stream, *_constants, ({passed},))",
        f"else: _launch(_x, _y, _z, _stream, *_constants, {passed})",
    ]  # fmt: skip
    body = "".join(f"    {line}\n" for line in lines)
    source = f"def launch(_grid, {', '.join([_passed(kernel), *fields])}):\n{body}"
    return _compiled(source, "launch", {
        "_launches": {}, "_kernel": kernel, "_by_triton": by_triton, "_hooks": kernel.pre_run_hooks,
        "_runtime": knobs.runtime, "driver": driver, "_given": _given,
    })  # fmt: skip


def _compiled(source: str, name: str, names: dict[str, Any]) -> Callable[..., None]:
    exec(source, names)
    return names[name]


def _prepare(compiled: Any, arguments: tuple[Any, ...]) -> _Launch | None:
    """How to launch a compiled kernel; None: Triton allocates memory for each of its launches."""
    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    constants, nested, first_maps = _record(compiled, arguments)
    maps: dict[Hashable, tuple[Any, ...]] = {}

    def encode(arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        encoded = _record(compiled, arguments)[2]
        tiled = [(at, a.tensor) for at, a in enumerate(arguments) if type(a) is Tiled]
        if len(maps) > _MOST_MAPS:
            maps.clear()
        maps.update(zip(((at, t.data_ptr(), t.shape, t.stride()) for at, t in tiled), encoded, strict=True))
        return encoded

    launch = _closure(launcher.launch)["launcher"].cell_contents if first_maps else launcher.launch
    return _Launch(launch, constants, nested, maps, encode)


def _record(compiled: Any, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool, list[tuple[Any, ...]]]:
    """What Triton passes to its C function: `constants` and `nested` of `_Launch`, and the arguments for each descriptor.

    Raises ValueError if it is not these arguments, in order.
    """
    places, calls = [object() for _ in range(4)], list[tuple[Any, ...]]()  # places: the grid's three sizes and the stream
    given = [_for_triton(a) for a in arguments]
    descriptors = [type(a) is Tiled for a in arguments]
    launcher = copy.copy(compiled.run)

    def record(*call: Any) -> None:
        calls.append(call)

    if any(descriptors):  # then `launch` is a function that encodes descriptors and calls the C function, its `launcher`
        encodes, cells = launcher.launch, _closure(launcher.launch) | {"launcher": CellType(record)}
        launcher.launch = FunctionType(encodes.__code__, encodes.__globals__, closure=tuple(cells.values()))
    else:
        launcher.launch = record
    launcher(*places, compiled.function, compiled.packed_metadata, None, None, None, *given)
    (call,) = calls
    nested = isinstance(call[-1], tuple | list) and call[-1] is not given[-1]  # not a record that is the last argument
    values, maps, at = list(call[-1] if nested else call[4:]), list[tuple[Any, ...]](), 0
    wanted = len(given) + sum(2 * len(g.shape) for g, described in zip(given, descriptors, strict=True) if described)
    values = values[len(values) - wanted :]
    as_expected = len(values) == wanted and all(a is b for a, b in zip(call[:4], places, strict=True))
    for argument, described in zip(given, descriptors, strict=True):
        if described:
            end = at + 1 + 2 * len(argument.shape)
            maps.append(tuple(values[at:end]))
            as_expected = as_expected and list(values[at + 1 : end]) == [*argument.shape, *argument.strides]
            at = end
        else:
            as_expected = as_expected and values[at] is argument
            at += 1
    if not as_expected:
        raise ValueError(f"{compiled.name}: its C function takes other arguments")
    return call[4:-1] if nested else call[4 : len(call) - wanted], nested, maps


def _closure(function: Any) -> dict[str, CellType]:
    """The variables that a function has from the function around it, in Python's order."""
    return dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
