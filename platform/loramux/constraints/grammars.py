"""Compile grammars within limits, first as a trial in a limited process.

A grammar is untrusted code from a caller, as text in llguidance's own format (`formats` and `tools` write it). The
trial (`prepare`, which the sandbox finds by this module's name) writes and compiles a grammar, and follows it for some
random tokens. Most hostile grammars exceed llguidance's own limits. Some overflow its stack, which ends the process, or
compile for minutes: in these cases the kernel ends the process. An engine needs no more time for a grammar than the
trial needed. The trial's stack is smaller than that of any engine thread, so the grammar cannot overflow an engine's
stack.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from loramux.constraints.formats import (
    AnswerFormat,
    GrammarText,
    JsonObject,
    JsonSchema,
    to_grammar,
    write_content,
    write_format,
)
from loramux.constraints.schemas import gist
from loramux.constraints.tools import Tool, ToolStyle, ToolUse, write_tools
from loramux.constraints.values import DEFAULT, Spelling

STACK_BYTES = 1 << 20
COMPILE_SECONDS = 0.5
MASK_SECONDS = 0.05
STEPS = 24
"""Number of tokens for which the trial follows a grammar."""


def limits() -> LLParserLimits:
    """Return the bounds of one grammar. llguidance counts them in its own units of work and memory."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # about 20 ms
        step_lexer_fuel=30_000,  # about 2 ms of one mask
        step_max_items=10_000,  # about 0.5 ms of one mask
        max_lexer_states=20_000,  # each entry takes 1 to 2 kB
        max_grammar_size=200_000,
        precompute_large_lexemes=True,
        verbose_errors=False,
    )


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher at the beginning of `grammar`. If the grammar has an error, the matcher holds it."""
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits())


class TrialSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Vocabulary of the base, which the trials use."""

    tokenizer: str
    """The vocabulary, as the JSON of the `tokenizers` library."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    white_space: str = "bounded"
    """White space that is allowed between the tokens of JSON: a key of `values.WHITE_SPACE`."""

    def spelling(self) -> Spelling:
        """Return the facts of this vocabulary that its grammars depend on.

        A grammar does not match special tokens by their text, nor added tokens in angle brackets.
        """
        added = msgspec.json.decode(self.tokenizer, type=_Tokens).added_tokens
        tokens = {one.content for one in added if one.special or one.content[:1] + one.content[-1:] == "<>"}
        return Spelling(white_space=self.white_space, tokens=tuple(sorted(tokens - {""})))


class _Token(msgspec.Struct, frozen=True):
    content: str
    special: bool = False


class _Tokens(msgspec.Struct, frozen=True):
    added_tokens: tuple[_Token, ...] = ()


class ToolGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """Tools of an answer, in the notation of the model."""

    use: ToolUse
    style: ToolStyle
    special: dict[str, int]
    """Token ids of the style's markers that a grammar cannot match as text."""

    def of(self, *tools: Tool) -> ToolGrammar:
        """Return the same for other tools."""
        return msgspec.structs.replace(self, use=msgspec.structs.replace(self.use, tools=tools))


class TrialJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job of a trial: a format, tools, or both."""

    format: AnswerFormat | None = None
    tools: ToolGrammar | None = None

    def write(self, spelling: Spelling = DEFAULT) -> GrammarText:
        """Write the grammar. Raises ValueError with a readable sentence if that is not possible."""
        if self.tools is None:
            assert self.format is not None, "a job has something to try"
            return write_format(self.format, spelling)
        content = None
        if self.format is not None and not self.tools.use.is_required:
            if not isinstance(self.format, JsonObject | JsonSchema):
                raise ValueError("with tools an answer has a JSON format or none; leave one of them out")
            content = write_content(self.format, spelling)
        return to_grammar(write_tools(self.tools.use, self.tools.style, self.tools.special, content, spelling))

    def loosened(self, fails: Callable[[TrialJob], bool] = lambda _: True) -> TrialJob:
        """Return the job with any JSON object as the arguments of each tool that is not strict and fails alone."""
        if self.tools is None:
            return self
        alone = [msgspec.structs.replace(self, format=None, tools=self.tools.of(tool)) for tool in self.tools.use.tools]
        loose = (
            tool.loosened() if not tool.strict and fails(job) else tool
            for tool, job in zip(self.tools.use.tools, alone, strict=True)
        )
        return msgspec.structs.replace(self, tools=self.tools.of(*loose))


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar, or a sentence that gives the reason why there is none."""

    grammar: GrammarText = ""
    refusal: str | None = None


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Read the vocabulary; return the function that tries one job."""
    vocabulary = msgspec.json.decode(setup, type=TrialSetup)
    eos = list(vocabulary.eos_token_ids) or None
    tokenizer = LLTokenizer(vocabulary.tokenizer, n_vocab=vocabulary.vocab_size, eos_token=eos)
    spelling = vocabulary.spelling()
    decoder = msgspec.json.Decoder(TrialJob)

    def run(payload: bytes) -> bytes:
        results: list[TrialResult] = []
        threading.stack_size(STACK_BYTES)
        trial = threading.Thread(target=lambda: results.append(_try(tokenizer, spelling, decoder.decode(payload))))
        trial.start()
        trial.join()
        return msgspec.json.encode(results[0])

    return run


def _try(tokenizer: LLTokenizer, spelling: Spelling, job: TrialJob) -> TrialResult:
    """Try a job. If it fails, leave out the schemas of the tools that fail alone; if it still fails, leave out those of
    all tools that are not strict.
    """

    def fails(one: TrialJob) -> bool:
        return _fault(tokenizer, one.write(spelling)) is not None

    fault: str | None = None
    try:
        for loosen in (lambda: job, lambda: job.loosened(fails), job.loosened):
            grammar = loosen().write(spelling)
            fault = _fault(tokenizer, grammar)
            if fault is None:
                return TrialResult(grammar=grammar)
            if job.tools is None:
                break
    except ValueError as error:
        fault = str(error)
    return TrialResult(refusal=fault)


def _fault(tokenizer: LLTokenizer, grammar: GrammarText) -> str | None:
    """Compile a grammar and follow it for some random tokens; return why it cannot be served."""
    began = time.process_time()
    matcher = compile_grammar(tokenizer, grammar)
    seconds = time.process_time() - began
    if seconds > COMPILE_SECONDS:
        return f"it takes {seconds:.1f} seconds to compile, and {COMPILE_SECONDS} are allowed"
    chance, words = random.Random(0), np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.int32)  # noqa: S311
    for _ in range(STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        began = time.process_time()
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if (seconds := time.process_time() - began) > MASK_SECONDS:
            return f"a token takes {seconds:.2f} seconds, and {MASK_SECONDS} are allowed"
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if not len(allowed) or not matcher.consume_token(int(chance.choice(allowed))):
            break
    return gist(matcher.get_error()) if matcher.is_error() else None
