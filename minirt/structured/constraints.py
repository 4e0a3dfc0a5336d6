"""`Constraints`: what the engine asks about grammars. It implements `minirt.engine.token_constraints`."""

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from minirt.errors import InputError, MinirtError, shortened
from minirt.structured.grammar import FORCED_TOO_LONG, Grammar, GrammarTokenizer
from minirt.structured.limits import COMPILE_STACK, reached
from minirt.structured.params import StructuredOutputsParams
from minirt.text.tokenizer import Tokenizer
from minirt.threads import usable_cpus

if TYPE_CHECKING:
    from minirt.engine.token_constraints import ConstrainedRows

MAX_GRAMMARS = 128  # compiled grammars that are kept
_COMPILERS = 4  # threads that compile, at most
_STARTING = threading.Lock()  # the size of new threads' stacks is one setting of the process
_T = TypeVar("_T")


class Constraint:
    """The grammar's state in one sequence.

    Args:
        ends: the tokens that end the text.
        min_tokens: before so many tokens, none of these is allowed, unless the grammar allows no other token.
    """

    def __init__(
        self, tokenizer: GrammarTokenizer, grammar: Grammar, matcher: Any, ends: frozenset[int], min_tokens: int
    ) -> None:
        self._tokenizer, self.matcher, self.ends, self._min_tokens = tokenizer, matcher, ends, min_tokens
        # Whether all masks of llguidance need a change.
        self._unlike = grammar.tokens_named or ends != grammar.end_ids or bool(tokenizer.text_ends)
        self._reasoning_end, self._messages, self._tail = grammar.reasoning_end, grammar.messages, b""
        if self._reasoning_end is not None:
            self._before = tokenizer.known & ~self.end_bits & self._reasoning_end.within
        self._count = 0  # of accepted tokens

    @cached_property
    def end_bits(self) -> Tensor:
        """A row of a mask in which only `ends` are allowed."""
        return self._tokenizer.bits(self.ends)

    def accept(self, tokens: Sequence[int]) -> None:
        """The next tokens of the sequence. Those up to the end of the reasoning block are no part of the grammar."""
        self._count += len(tokens)
        for token in tokens:
            if self._reasoning_end is None:
                self.matcher.consume_token(token)  # if it fails, the next mask does, too
            else:
                new = self._tokenizer.text(token)
                self._messages = None if self._messages is None else self._messages.after(new)
                text = self._tail + new
                self._tail = self._reasoning_end.tail(text)
                if self._reasoning_end.ends(text):
                    self._reasoning_end = None

    def copy(self) -> "Constraint":
        """The same state, whose tokens do not change this one.

        llguidance can roll a matcher back, but not out of an error, nor in a grammar with "max_tokens" or "stop". A copy takes
        microseconds.
        """
        other = copy.copy(self)
        other.matcher = self.matcher.deep_copy()
        return other

    @property
    def reasons(self) -> bool:
        """Whether the grammar has not begun."""
        return self._reasoning_end is not None

    def reason(self, mask: Tensor) -> None:
        """Write the mask of a token before the grammar begins: all tokens but those that go beyond the block's end, and ends,
        unless there was a call."""
        mask.copy_(self._before)
        if self._messages is not None and self._messages.called and self._count >= self._min_tokens:
            mask |= self.end_bits
        if self._reasoning_end is not None:
            self._reasoning_end.restrict(mask, self._tail)

    def goes_on(self, mask: Tensor, token: int) -> bool:
        """Whether a token is allowed by this state's mask and does not end the request. A draft may be any number."""
        word = int(mask[token >> 5]) if 0 <= token < 32 * len(mask) else 0
        return bool(word >> (token & 31) & 1) and token not in self.ends

    @property
    def adjusts(self) -> bool:
        """Whether the next mask is to be passed to `adjust`."""
        return self._unlike or self._count < self._min_tokens

    def adjust(self, mask: Tensor) -> None:
        """Unknown ids out; where the text may end, its ends in, elsewhere the model's out; ends out before `min_tokens`."""
        mask &= self._tokenizer.known
        if self.matcher.is_accepting():
            mask |= self.end_bits
        elif self._tokenizer.text_ends:
            mask &= self._tokenizer.no_text_ends
        if self._count < self._min_tokens and bool((mask & ~self.end_bits).any()):
            mask &= ~self.end_bits

    def error(self) -> InputError:
        """Why there is no mask."""
        text, place = self.matcher.get_error().partition("<")[0].strip(), f"generated token {self._count}"
        what, hint = "the grammar cannot go on", "simplify the grammar"
        if FORCED_TOO_LONG in text:
            what, hint = f"{what}: it allows only one text from here, which is endless or too long", "let the text end"
        elif (error := reached(text, place)) is not None:
            return error
        return InputError(what, where=place, found=shortened(text), hint=hint)


class Constraints:
    """Compiles grammars, keeps the last ones, and computes the masks of a step.

    Args:
        tokenizer, vocab, end_ids: see `GrammarTokenizer`. llguidance is imported when the first grammar is compiled.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, end_ids: Sequence[int]) -> None:
        self._made_of = tokenizer, vocab, end_ids
        self._lock = threading.Lock()
        self._tokenizer: GrammarTokenizer | None = None
        self._grammars: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        self._pool = ThreadPoolExecutor(min(_COMPILERS, usable_cpus()), thread_name_prefix="minirt-grammar")

    def compile(self, spec: StructuredOutputsParams) -> None:
        """Compile a grammar, if it is not in the cache, and wait for it. Any thread but the engine's may call it.

        Raises:
            InputError, UnsupportedError: see `Grammar` and `GrammarTokenizer`.
        """
        self._submit(self._grammar, spec).result()

    def _submit(self, function: Callable[..., _T], *arguments: Any) -> "Future[_T]":
        """Call a function that compiles in one of the threads that have the stack for it."""
        with _STARTING:
            before = threading.stack_size(COMPILE_STACK)
            try:
                return self._pool.submit(function, *arguments)
            finally:
                threading.stack_size(before)

    def prepare(self, spec: StructuredOutputsParams, ends: Sequence[int], min_tokens: int) -> "Future[Constraint]":
        """A new sequence's constraint. Does not wait: unless a matcher is ready, a thread compiles it."""
        grammar = self._find(spec)
        if grammar is None or (matcher := grammar.take()) is None:
            return self._submit(self._new, spec, ends, min_tokens)
        self._submit(grammar.restock)
        future: Future[Constraint] = Future()
        future.set_result(self._constraint(grammar, matcher, ends, min_tokens))
        return future

    def _new(self, spec: StructuredOutputsParams, ends: Sequence[int], min_tokens: int) -> Constraint:
        grammar = self._grammar(spec)
        matcher = grammar.take()
        return self._constraint(grammar, grammar.compile() if matcher is None else matcher, ends, min_tokens)

    def _constraint(self, grammar: Grammar, matcher: Any, ends: Sequence[int], min_tokens: int) -> Constraint:
        tokenizer = self._need_tokenizer()
        return Constraint(tokenizer, grammar, matcher, tokenizer.known_ids.intersection(ends), min_tokens)

    def _grammar(self, spec: StructuredOutputsParams) -> Grammar:
        grammar = self._find(spec)
        if grammar is None:
            grammar = Grammar(spec, self._need_tokenizer())
            with self._lock:
                self._grammars[spec] = grammar
                while len(self._grammars) > MAX_GRAMMARS:
                    self._grammars.popitem(last=False)
        return grammar

    def _find(self, spec: StructuredOutputsParams) -> Grammar | None:
        with self._lock:
            if spec in self._grammars:
                self._grammars.move_to_end(spec)
            return self._grammars.get(spec)

    def _need_tokenizer(self) -> GrammarTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = GrammarTokenizer(*self._made_of)
            return self._tokenizer

    def fill(self, masks: Tensor, rows: "Sequence[ConstrainedRows]") -> dict[int, MinirtError]:
        """Write the masks of a step. See `TokenConstraints.fill`.

        The rows of a sequence depend on each other, so the first rows of all sequences are computed together, then their second
        rows, and so on.
        """
        free, bound, places, first = list[int](), list[tuple[int, Constraint]](), dict[int, int](), 0
        walks = list[tuple[int, int, Constraint, Iterator[int]]]()  # the row with the last mask, the end of the rows, the state
        for place, (constraint, num_rows, drafts) in enumerate(rows):
            if constraint is None:
                free += range(first, first + num_rows)
            else:
                bound.append((first, constraint))
                places[first] = place
                if num_rows > 1:
                    walks.append((first, first + num_rows, constraint, iter(drafts)))
            first += num_rows
        errors = self._fill_rows(masks, bound)
        failed = {places[row]: error for row, error in errors.items()}
        copied = False
        while walks:
            going_on = []
            for row, end, constraint, left in walks:
                draft = next(left, None)
                if draft is None or row + 1 == end or row in errors or not constraint.goes_on(masks[row], draft):
                    free += range(row + 1, end)
                else:
                    state = constraint if copied else constraint.copy()
                    state.accept((draft,))
                    going_on.append((row + 1, end, state, left))
            copied = True
            errors = self._fill_rows(masks, [(row, constraint) for row, _, constraint, _ in going_on])
            for row in errors:
                masks[row] = 0
            walks = going_on
        if free:
            masks.index_fill_(0, torch.tensor(free), -1)
        return failed

    def _fill_rows(self, masks: Tensor, rows: "Sequence[tuple[int, Constraint]]") -> dict[int, MinirtError]:
        """Write masks of states into these rows. Returns the errors of those that cannot go on; their masks are undefined."""
        parsed = [(row, constraint) for row, constraint in rows if not constraint.reasons]
        for row, constraint in rows if len(parsed) < len(rows) else ():
            if constraint.reasons:
                constraint.reason(masks[row])
        if parsed:
            matchers, executor = [(constraint.matcher, row) for row, constraint in parsed], self._need_tokenizer().executor
            executor.unsafe_compute_mask_ptr(matchers, masks.data_ptr(), 4 * masks.shape[1], len(masks))  # releases the GIL
        failed: dict[int, MinirtError] = {}
        for row, constraint in parsed:
            if constraint.matcher.is_error():
                failed[row] = constraint.error()
            elif constraint.adjusts:
                constraint.adjust(masks[row])
        return failed
