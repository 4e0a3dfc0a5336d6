"""`Declaration`: an operation's arguments and results as text, with the axes and dtypes of its tensors.

    x: [T, K] activations, weight?: [K: norm] of x, eps: float, *, blocks: bool = False -> out: [T, K] of x

An argument is `name: type`, and ` = default` as in Python. `name?` may be None, `name!` is written. `name.field` is a field of
an argument that is a record. Arguments after `*` are given by name. The type of a tensor is its axes, its dtype and its strides:

    [T, K]               axes. The first tensor with a name sets its size; further ones must have the same
    [B + 1]  [N // 2]    an expression of the names of other axes and of arguments of type int
    [K: norm]            a size that a rule of `checks.SIZES` limits
    [any]  [N, ...]      any size; any axes after the first
    activations          bf16, fp16 or fp32
    of x                 the dtype of the argument x
    fp32 fp8 int32 …     this dtype; of x or fp32: one of both. A result in fp8 needs a GPU with FP8
    of x or fp8 with s   fp8 if the argument `s` is given, else the dtype of x
    any dtype            the operation's `check` says which
    rows apart           only the last axis must be contiguous; any strides: none must; without: all must
    together with s      both are given, or neither

A result of type `like x` has x's shape, dtype and order of axes in memory. This file imports neither PyTorch nor Triton.
"""

import re
from ast import literal_eval
from functools import cached_property
from inspect import Parameter, Signature
from typing import NamedTuple

_ARGUMENT = re.compile(r"(\*)|([\w.]+)([?!]*): (?:\[([^]]*)\] )?([\w. ]+?)(?: = ([\w.-]+))?(?=, |$)")
_STRIDES = " rows apart", " any strides"


class Argument(NamedTuple):
    """An argument or result, as its text says.

    Attributes:
        axes: of a tensor; None: another value. `further_axes`: any axes may follow.
        type: a tensor's dtype as in the text, or the type of another value.
        strides: "rows apart", "any strides", or "": contiguous.
        together: the argument that must be given if, and only if, this one is.
        default: as in Python; None: there is none.
    """

    name: str
    axes: tuple[str, ...] | None
    type: str
    optional: bool = False
    written: bool = False
    further_axes: bool = False
    strides: str = ""
    together: str | None = None
    default: str | None = None
    by_name: bool = False

    @property
    def rows(self) -> bool:
        """Whether it is a tensor [T, …] of two axes, so that a function of modules takes any leading dimensions."""
        return self.axes is not None and len(self.axes) == 2 and self.axes[0] == "T"

    @property
    def bound(self) -> bool:
        """Whether no axis is an expression of others, so that the tensor can be checked before all sizes are known."""
        return all(re.fullmatch(r"\w+(: .*)?", axis) for axis in self.axes or ())


class Declaration:
    """The arguments and results of an operation, read from the text on first use."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        return _parse(self.text.partition(" -> ")[0])

    @cached_property
    def results(self) -> tuple[Argument, ...]:
        return tuple(result._replace(optional=True) for result in _parse(self.text.partition(" -> ")[2]))

    @cached_property
    def tensors(self) -> tuple[Argument, ...]:
        """The arguments and results that are tensors with axes, in the order in which they are checked: names of axes first."""
        tensors = [argument for argument in (*self.arguments, *self.results) if argument.axes is not None]
        return tuple(sorted(tensors, key=lambda argument: not argument.bound))

    @cached_property
    def first(self) -> str:
        """The first argument that is a tensor. The others must be on its device."""
        return next(argument.name for argument in self.arguments if argument.axes is not None)

    @property
    def signature(self) -> Signature:
        """The signature of a function in Python, without types."""
        return Signature([
            Parameter(
                argument.name, Parameter.KEYWORD_ONLY if argument.by_name else Parameter.POSITIONAL_OR_KEYWORD,
                default=Parameter.empty if argument.default is None else literal_eval(argument.default),
            )
            for argument in self.arguments
        ])  # fmt: skip

    @property
    def schema(self) -> str:
        """The schema of the PyTorch op."""
        letters, arguments = iter("abcdefgh"), []
        for i, argument in enumerate(self.arguments):
            if argument.by_name and not self.arguments[i - 1].by_name:
                arguments.append("*")
            kind = argument.type.replace("activation", "str")
            if argument.axes is not None:
                kind = "Tensor" + (f"({next(letters)}!)" if argument.written else "")
            kind += "?" * argument.optional
            arguments.append(f"{kind} {argument.name}" + (f"={argument.default}" if argument.default else ""))
        results = ", ".join("Tensor" for _ in self.results)
        return f"({', '.join(arguments)}) -> " + (results if len(self.results) == 1 else f"({results})")


def _parse(text: str) -> tuple[Argument, ...]:
    arguments, by_name, at = [], False, 0
    while at < len(text):
        if (match := _ARGUMENT.match(text, at)) is None:
            raise ValueError(f"not an argument: {text[at:]!r}")
        at = match.end() + 2
        star, name, marks, axes, kind, default = match.groups()
        by_name = by_name or star is not None
        if star is None:
            kind, _, together = kind.partition(" together with ")
            strides = next((words for words in _STRIDES if kind.endswith(words)), "")
            sizes = None if axes is None else tuple(axes.split(", "))
            arguments.append(Argument(
                name, None if sizes is None else sizes[: -1 if sizes[-1] == "..." else None], kind.removesuffix(strides),
                "?" in marks, "!" in marks, sizes is not None and sizes[-1] == "...", strides.strip(), together or None, default,
                by_name,
            ))  # fmt: skip
    return tuple(arguments)
