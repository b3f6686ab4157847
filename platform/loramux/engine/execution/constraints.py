"""The tokens that constrained answers may continue with: one bit a token, a row of words for each row of logits.

Compiling a grammar takes milliseconds, and a hostile grammar takes as long as `compile_grammar` allows. So it never
happens in a step: a request with a constraint joins the queue when its grammar is compiled (`GrammarCompiler`). While
llguidance compiles, it releases the interpreter's lock.

A matcher's state follows from the constraint and the answer's tokens alone. The state is kept here, by sequence, and is
advanced by the tokens that were appended since the last step. So a preempted sequence finds its state unchanged. A
sequence that continues tokens of another engine builds its state from those tokens.

Masks are filled while the model runs: they need the tokens of earlier steps only. llguidance fills those of many rows
on its own threads and without the interpreter's lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from loramux.common.jobs import TenantQueues
from loramux.common.tokenizer_file import load_tokenizer
from loramux.constraints.grammars import compile_grammar
from loramux.engine.messages import Constraint, EngineFault, Request
from loramux.engine.scheduling.sequence import PENDING, Sequence

_BITS = 32

THREADS = 2
MAX_COMPILED = 256
"""Compiled grammars that are kept, over all tenants."""
MAX_COMPILED_OF_TENANT = 32

TOO_COMPLEX = "constraint_too_complex"
INVALID = "invalid_constraint"


def load_vocabulary(model_dir: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer | None:
    """Return the vocabulary in llguidance's form; None if the tokenizer is not from the `tokenizers` library."""
    from llguidance.hf import from_tokenizer
    from transformers import PreTrainedTokenizerFast  # takes seconds, so only if a model is served

    try:
        tokenizer = load_tokenizer(model_dir).tokenizer
    except (OSError, ValueError):
        return None  # the server refuses to start without a tokenizer, and says so
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    if len(tokenizer) <= max(eos_token_ids, default=0):
        return None  # from a folder without tokenizer files transformers makes an empty tokenizer for some families
    num_tokens = max(vocab_size, len(tokenizer))
    return from_tokenizer(tokenizer, n_vocab=num_tokens, eos_token=list(eos_token_ids) or None)


class GrammarCompiler:
    """Compiles grammars on threads, one at a time for a tenant, and keeps each tenant's latest."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._queues = TenantQueues("grammars", THREADS, per_tenant=1)
        self._compiled: OrderedDict[tuple[str, str], Future[LLMatcher]] = OrderedDict()
        """Grammars by tenant and text, the latest used last."""

    def compile(self, tenant: str, grammar: str) -> Future[LLMatcher]:
        """Return the matcher of `grammar`, to be copied for each answer, once it is compiled."""
        key = (tenant, grammar)
        if (kept := self._compiled.get(key)) is not None:
            self._compiled.move_to_end(key)
            return kept
        compiled = self._compiled[key] = Future()
        self._evict(tenant)
        self._queues.submit(tenant, lambda: compiled.set_result(compile_grammar(self._tokenizer, grammar)))
        return compiled

    def close(self) -> None:
        """End the threads."""
        self._queues.close()

    def _evict(self, tenant: str) -> None:
        own = [key for key in self._compiled if key[0] == tenant]
        if len(own) > MAX_COMPILED_OF_TENANT:
            del self._compiled[own[0]]
        elif len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The allowed tokens of the constrained rows of a step's logits."""

    rows: NDArray[np.int64]
    """int64[M]: ascending rows of logits."""
    words: NDArray[np.int32]
    """int32[M, W]: bit t % 32 of word t // 32 is set if token t is allowed; tokens beyond the words are not allowed."""
    faults: dict[int, EngineFault]
    """Faults of rows without a token to choose, by row of logits."""


@dataclass(slots=True)
class _Progress:
    """Progress of one answer in its constraint."""

    constraint: Constraint
    matcher: LLMatcher
    num_read: int = 0
    """Number of tokens of the answer that were read."""
    is_free: bool = False
    """True while the part that the constraint does not apply to, such as thinking, has not ended."""

    @property
    def may_open(self) -> bool:
        """May the next token, which is the first, open the part that the constraint does not apply to?"""
        return self.num_read == 0 and self.constraint.opening is not None

    def read(self, token_ids: list[int]) -> None:
        """Advance by the answer's tokens since the last call."""
        fresh = token_ids[self.num_read :]
        if PENDING in fresh:
            return  # the answer has ended with a fault and its token never came, but one more row of it was launched
        self.is_free |= self.may_open and fresh[:1] == [self.constraint.opening]
        self.num_read += len(fresh)
        if self.is_free and (end := self.end_of_free_part(fresh)) is not None:
            self.is_free = False
            fresh = fresh[end if fresh[end] == self.constraint.entry else end + 1 :]
        if fresh and not self.is_free:
            self.matcher.consume_tokens(fresh)

    def end_of_free_part(self, token_ids: list[int]) -> int | None:
        """Return the index of the token that ends the free part; None if there is none."""
        ends = (self.constraint.after, self.constraint.entry)
        return next((place for place, token_id in enumerate(token_ids) if token_id in ends), None)


class Constraints:
    """Constraints of an engine's requests, from their grammars to the masks of each step."""

    def __init__(self, tokenizer: LLTokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self._compiler = GrammarCompiler(tokenizer)
        self._executor = LLExecutor()
        self._num_tokens = tokenizer.vocab_size
        self._num_words = -(-self._num_tokens // _BITS)
        self._unended = _all_but(eos_token_ids, self._num_words)
        """The mask that allows every token but the ends."""
        self._progress: dict[str, _Progress] = {}

    def compile(self, request: Request) -> Future[LLMatcher]:
        """Compile a request's constraint on another thread."""
        assert request.constraint is not None, "it has a constraint"
        return self._compiler.compile(request.tenant, request.constraint.grammar)

    def begin(self, request: Request, compiled: LLMatcher) -> EngineFault | None:
        """Create the state of an answer that is about to begin; return a fault if its constraint cannot be followed."""
        constraint = request.constraint
        assert constraint is not None, "it has a constraint"
        if compiled.is_error():
            return EngineFault(INVALID, _sentence(constraint, compiled), field=constraint.field)
        is_free = constraint.after is not None and constraint.opening is None
        self._progress[request.id] = _Progress(constraint, compiled.deep_copy(), is_free=is_free)
        return None

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has ended."""
        self._progress.pop(request_id, None)

    def close(self) -> None:
        """End the threads."""
        self._compiler.close()

    def masks(self, sequences: list[Sequence], drafts: Mapping[Sequence, list[int]] | None = None) -> TokenMasks | None:
        """Return the masks for the next token of each sequence; None if no sequence is constrained.

        Every sequence has one row of logits. If `drafts` has tokens for it, it has one more row for each draft: the
        allowed tokens after the first, second, ... draft. Rows after a draft that is not allowed have no meaning.
        """
        drafts = drafts or {}
        row, constrained = 0, []
        for sequence in sequences:
            proposed = drafts.get(sequence, [])
            if sequence.request.constraint is not None:
                constrained.append((row, sequence, proposed))
            row += 1 + len(proposed)
        if not constrained:
            return None
        rows = [first + i for first, _, proposed in constrained for i in range(1 + len(proposed))]
        words = np.zeros((len(rows), self._num_words), dtype=np.int32)
        faults = self._fill(constrained, words)
        return TokenMasks(np.array(rows, dtype=np.int64), words, faults)

    def _fill(
        self, constrained: list[tuple[int, Sequence, list[int]]], words: NDArray[np.int32]
    ) -> dict[int, EngineFault]:
        single: list[tuple[LLMatcher, int]] = []
        several: list[tuple[LLMatcher, int, list[int]]] = []
        place = 0
        for _, sequence, proposed in constrained:
            progress = self._progress[sequence.id]
            progress.read(sequence.token_ids[sequence.num_prompt_tokens :])
            for matcher, row, drafts in self._rows(progress, proposed, words[place:]):
                # A draft that an adapter has added is no token of the grammar, and would put the matcher in error.
                if known := [*takewhile(self._num_tokens.__gt__, drafts)]:
                    several.append((matcher, place + row, known))
                else:
                    single.append((matcher, place + row))
            place += 1 + len(proposed)
        address, row_bytes = words.ctypes.data, words.shape[1] * words.itemsize
        if single:
            self._executor.unsafe_compute_mask_ptr(single, address, row_bytes, len(words))
        if several:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(several, address, row_bytes, len(words))
        faults, place = {}, 0
        for row, sequence, proposed in constrained:
            progress = self._progress[sequence.id]
            if progress.may_open and (opening := progress.constraint.opening) is not None:
                words[place] |= ~_all_but((opening,), self._num_words)
            if progress.matcher.is_error():
                message = _sentence(progress.constraint, progress.matcher)
                faults[row] = EngineFault(TOO_COMPLEX, message, field=progress.constraint.field)
            self._settle_ends(sequence, words[place : place + 1 + len(proposed)])
            place += 1 + len(proposed)
        return faults

    def _rows(
        self, progress: _Progress, proposed: list[int], words: NDArray[np.int32]
    ) -> list[tuple[LLMatcher, int, list[int]]]:
        """Fill a sequence's rows that the grammar does not apply to; return matcher, first row and drafts of the other
        rows."""
        opens = progress.may_open and proposed[:1] == [progress.constraint.opening]
        if not (progress.is_free or opens):
            return [(progress.matcher, 0, proposed)]
        first = 1 if opens else 0  # the row before the free part is open
        end = progress.end_of_free_part(proposed[first:])
        behind = first + (len(proposed[first:]) if end is None else end) + 1
        words[first:behind] = -1
        rows: list[tuple[LLMatcher, int, list[int]]] = [(progress.matcher, 0, [])] if opens else []
        if end is not None:
            matcher = progress.matcher.deep_copy()
            if proposed[first + end] == progress.constraint.entry:
                matcher.consume_token(proposed[first + end])
            rows.append((matcher, behind, proposed[behind:]))
        return rows

    def _settle_ends(self, sequence: Sequence, words: NDArray[np.int32]) -> None:
        """Replace the base's end tokens by the revision's; forbid them before `min_tokens`, unless no token would be
        left."""
        own = sequence.request.eos_token_ids
        for i, row in enumerate(words):
            if own and (row & ~self._unended).any():
                row[:] = row & self._unended | ~_all_but(own, self._num_words)
            if sequence.num_output_tokens + i < sequence.request.sampling.min_tokens:
                others = row & (_all_but(own, self._num_words) if own else self._unended)
                if others.any():
                    row[:] = others


def token_words(token_ids: Iterable[int], vocab: int) -> NDArray[np.int32]:
    """Return the words of a mask that allows `token_ids` alone."""
    words = np.zeros(-(-vocab // _BITS), dtype=np.uint32)
    for token_id in token_ids:
        words[token_id // _BITS] |= 1 << token_id % _BITS
    return words.view(np.int32)


def _all_but(token_ids: tuple[int, ...], num_words: int) -> NDArray[np.int32]:
    words = np.full(num_words, 0xFFFF_FFFF, dtype=np.uint32)
    for token_id in token_ids:
        words[token_id // _BITS] &= 0xFFFF_FFFF ^ (1 << token_id % _BITS)
    return words.view(np.int32)


def _sentence(constraint: Constraint, matcher: LLMatcher) -> str:
    """Return the matcher's error as a sentence for the caller."""
    reason = matcher.get_error().partition("\n<state>")[0].strip()[:300]
    return f"'{constraint.field}' cannot be followed: {reason}. Simplify it, or leave it out."
