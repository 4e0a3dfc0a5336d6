"""`Constraints`: what the engine asks about grammars. It implements `minirt.engine.token_constraints`."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from minirt.errors import EngineError, InputError, MinirtError, shortened
from minirt.structured.grammar import Grammar, GrammarTokenizer
from minirt.structured.params import StructuredOutputsParams
from minirt.text.tokenizer import Tokenizer
from minirt.threads import usable_cpus

MAX_GRAMMARS = 128  # compiled grammars that are kept
_COMPILERS = 2  # threads that compile for the engine
_MASKERS = 8  # threads that compute masks, at most


class Constraint:
    """The grammar's state in one sequence. `accept` only notes tokens; `Constraints.fill` hands them to llguidance.

    Args:
        ends: the tokens that end the text.
        min_tokens: before so many tokens, none of these is allowed, unless the grammar allows no other token.
    """

    def __init__(self, grammar: Grammar, ends: frozenset[int], min_tokens: int) -> None:
        self.matcher, self.ends, self.min_tokens = grammar.matcher(), ends, min_tokens
        self.adjusted = grammar.tokens_named or ends != grammar.end_ids  # whether llguidance's masks need a change
        self.marker = grammar.marker  # None: the grammar has begun
        self.count = 0  # of accepted tokens
        self.new: list[int] = []
        self._tail = b""

    def accept(self, tokens: Sequence[int]) -> None:
        self.new += tokens
        self.count += len(tokens)

    def begin(self, tokenizer: GrammarTokenizer) -> bool:
        """Whether the grammar has begun. Drops new tokens up to the one that ends the reasoning block."""
        while self.marker is not None and self.new:
            text = self._tail + tokenizer.text(self.new.pop(0))
            self._tail = text[-(len(self.marker) - 1) :] if len(self.marker) > 1 else b""
            if self.marker in text:
                self.marker = None
        return self.marker is None


class CompiledConstraint:
    """A compiled grammar, from which each sequence starts with a state of its own."""

    def __init__(self, grammar: Grammar, known: frozenset[int]) -> None:
        self._grammar, self._known = grammar, known

    def start(self, ends: Sequence[int], min_tokens: int) -> Constraint:
        return Constraint(self._grammar, self._known.intersection(ends), min_tokens)


class Constraints:
    """Compiles grammars, keeps the last ones, and computes the masks of a step.

    Args:
        tokenizer, vocab, end_ids: see `GrammarTokenizer`. llguidance is imported when the first grammar is compiled.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, end_ids: Sequence[int]) -> None:
        self._made_of, self._vocab = (tokenizer, vocab, end_ids), vocab
        self._lock = threading.Lock()
        self._tools: _Tools | None = None
        self._compiled: OrderedDict[StructuredOutputsParams, CompiledConstraint] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None

    def compile(self, spec: StructuredOutputsParams) -> CompiledConstraint:
        """The compiled grammar, from the cache or new. Any thread but the engine's may call it.

        Raises:
            InputError, UnsupportedError: see `Grammar` and `GrammarTokenizer`.
        """
        if (known := self._find(spec)) is not None:
            return known
        with self._lock:
            if self._tools is None:
                self._tools = _Tools(*self._made_of)
            tools = self._tools
        compiled = CompiledConstraint(Grammar(spec, tools.tokenizer), tools.tokenizer.known_ids)
        with self._lock:
            self._compiled[spec] = compiled
            while len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
        return compiled

    def prepare(self, spec: StructuredOutputsParams) -> "Future[CompiledConstraint]":
        """The same without waiting: the result is there if the grammar is in the cache, else a thread compiles it."""
        if (known := self._find(spec)) is not None:
            future: Future[CompiledConstraint] = Future()
            future.set_result(known)
            return future
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="minirt-grammar")
        return self._pool.submit(self.compile, spec)

    def _find(self, spec: StructuredOutputsParams) -> CompiledConstraint | None:
        with self._lock:
            if spec in self._compiled:
                self._compiled.move_to_end(spec)
            return self._compiled.get(spec)

    def fill(self, masks: Tensor, constraints: Sequence[Constraint | None]) -> dict[int, MinirtError]:
        """Write the mask of each row's next token.

        Args:
            masks: [B, ceil(vocab / 32)] int32 on the CPU: bit v mod 32 of word v div 32 becomes 1 if token v is allowed.
            constraints: of each row; None: every token is allowed.
        Returns:
            The errors of the rows whose grammar cannot go on. Their masks are arbitrary.
        """
        tools = self._tools
        if tools is None:
            raise EngineError("no grammar was compiled")
        rows = [(row, own) for row, own in enumerate(constraints) if own is not None]
        begun = [(row, own) for row, own in rows if own.begin(tools.tokenizer)]
        free = [row for row, own in enumerate(constraints) if own is None]
        waiting = [(row, own) for row, own in rows if own.marker is not None]
        if free:
            masks.index_fill_(0, torch.tensor(free), -1)
        for row, own in waiting:
            torch.bitwise_and(tools.known, ~tools.bits(own.ends), out=masks[row])
        failed = tools.consume(begun)
        matchers = [(own.matcher, row) for row, own in begun]
        if matchers:
            tools.executor.unsafe_compute_mask_ptr(matchers, masks.data_ptr(), 4 * masks.shape[1], len(masks))
        for row, own in begun:
            if row not in failed and own.matcher.is_error():
                failed[row] = _stopped(own)
            elif own.adjusted or own.count < own.min_tokens:
                tools.adjust(masks[row], own)
        return failed


class _Tools:
    """What needs llguidance, made with the first grammar."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, end_ids: Sequence[int]) -> None:
        self.tokenizer, self._words = GrammarTokenizer(tokenizer, vocab, end_ids), -(-vocab // 32)
        from llguidance import LLExecutor

        self.executor = LLExecutor(min(_MASKERS, usable_cpus()))
        self.known = self.bits(self.tokenizer.known_ids)

    def bits(self, tokens: frozenset[int]) -> Tensor:
        """A row of a mask in which these tokens are allowed."""
        bits = bytearray(4 * self._words)
        for token in tokens:
            bits[token >> 3] |= 1 << (token & 7)
        return torch.frombuffer(bits, dtype=torch.int32)

    def consume(self, rows: Sequence[tuple[int, Constraint]]) -> dict[int, MinirtError]:
        """Hand new tokens to llguidance. Returns the errors of the rows where it refuses one."""
        failed: dict[int, MinirtError] = {}
        single = [(row, own) for row, own in rows if len(own.new) == 1]
        if single:
            taken = self.executor.consume_token_par([(own.matcher, own.new[0]) for _, own in single])
            failed = {row: _stopped(own) for (row, own), good in zip(single, taken, strict=True) if not good}
        for row, own in rows:
            if len(own.new) > 1 and not own.matcher.consume_tokens(own.new):
                failed[row] = _stopped(own)
            own.new.clear()
        return failed

    def adjust(self, mask: Tensor, own: Constraint) -> None:
        """Unknown ids out; where the text may end, all of its ends in; ends out before `min_tokens`."""
        mask &= self.known
        ends = self.bits(own.ends)
        if own.matcher.is_accepting():
            mask |= ends
        if own.count < own.min_tokens and bool((mask & ~ends).any()):
            mask &= ~ends


def _stopped(constraint: Constraint) -> InputError:
    where, found = f"generated token {constraint.count}", shortened(constraint.matcher.get_error().partition("<")[0].strip())
    return InputError("the grammar cannot go on", where=where, found=found, hint="simplify the grammar")


