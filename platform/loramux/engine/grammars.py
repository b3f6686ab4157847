"""Grammars that answers must follow, compiled by llguidance on threads of their own, within limits.

A grammar is text in llguidance's own format (`loramux.constraints` writes it). Compiling one takes milliseconds, a
hostile one up to the limits below, so it never happens in a step: a request with a constraint joins the queue when its
grammar is compiled. llguidance releases the interpreter's lock meanwhile.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

THREADS = 2
MAX_COMPILED = 256
"""Compiled grammars that are kept, over all tenants."""
MAX_COMPILED_OF_TENANT = 32


def limits() -> LLParserLimits:
    """Return the bounds of one grammar; llguidance counts them in its own units of work and of memory."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # about 20 ms
        step_lexer_fuel=30_000,  # about 2 ms of one mask
        step_max_items=10_000,  # about 0.5 ms of one mask
        max_lexer_states=20_000,  # 1 to 2 kB each
        max_grammar_size=200_000,
        precompute_large_lexemes=True,
        verbose_errors=False,
    )


def load_tokenizer(model_dir: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer | None:
    """Return the model's vocabulary as grammars read it; None where its tokenizer is not one of `tokenizers`."""
    from llguidance.hf import from_tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes seconds: only where a model is served

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError):
        return None  # the gateway refuses to start without one, and says so
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    if len(tokenizer) <= max(eos_token_ids, default=0):
        return None  # of a folder without tokenizer files transformers makes an empty one for some families
    num_tokens = max(vocab_size, len(tokenizer))
    return from_tokenizer(tokenizer, n_vocab=num_tokens, eos_token=list(eos_token_ids) or None)


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher at the beginning of `grammar`; it holds its error where there is one."""
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits())


class GrammarCompiler:
    """Compiles grammars on threads, one at a time for a tenant, and keeps each tenant's latest."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammars")
        self._compiled: OrderedDict[tuple[str, str], Future[LLMatcher]] = OrderedDict()
        """Grammars by tenant and text, the latest used last."""
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[Callable[[], Any]]] = {}
        """The work of each tenant, the first of it under way."""

    def compile(self, tenant: str, grammar: str) -> Future[LLMatcher]:
        """Return the matcher of `grammar`, to be copied for each answer, once it is compiled."""
        key = (tenant, grammar)
        if (kept := self._compiled.get(key)) is not None:
            self._compiled.move_to_end(key)
            return kept
        compiled = self._compiled[key] = Future()
        self._evict(tenant)
        with self._lock:
            work = self._waiting.setdefault(tenant, deque())
            work.append(lambda: compiled.set_result(compile_grammar(self._tokenizer, grammar)))
            if len(work) == 1:
                self._threads.submit(self._run_next, tenant)
        return compiled

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run_next(self, tenant: str) -> None:
        self._waiting[tenant][0]()
        with self._lock:
            work = self._waiting[tenant]
            work.popleft()
            if work:  # behind the other tenants' work
                self._threads.submit(self._run_next, tenant)
            else:
                del self._waiting[tenant]

    def _evict(self, tenant: str) -> None:
        own = [key for key in self._compiled if key[0] == tenant]
        if len(own) > MAX_COMPILED_OF_TENANT:
            del self._compiled[own[0]]
        elif len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
