"""The text side of a model: its tokenizer, chat template and defaults, and the grammars that its answers follow.

A revision with a bundle has its own `Format`; `Formats` makes a format at its first use, and renders conversations. A
revision's template is code from a customer: it is rendered in limited processes. Each tenant may use few processes at a
time, so that one tenant's templates do not delay other tenants. The base's own template is rendered in this process.

`GrammarTrials` turns the requested answer format and tools into a `Constraint` of the engine. Each new constraint is
first compiled in a limited process, one at a time for each tenant. Results are kept by tenant.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loramux.catalog.registry.resolver import Revision
from loramux.catalog.validation.rendering import TemplateFailed, TemplateRenderer, template_variables
from loramux.common.bundle import NO_BUNDLE, Bundle, SamplingDefaults, read_bundle
from loramux.common.jobs import TenantSlots, ThreadPool
from loramux.common.sandbox.sandbox import JobLimits, JobMeter, Sandbox, SandboxDied, SandboxError, metered
from loramux.common.settings.serving import WhiteSpace
from loramux.constraints.grammars import ToolGrammar, TrialJob, TrialResult, TrialSetup
from loramux.constraints.tools import ToolUse
from loramux.engine.messages import Constraint, ModelFacts
from loramux.serving.errors import InvalidRequest, Unavailable
from loramux.serving.messages import ChatOptions, Classes, Conversation, GenerationRequest, Message
from loramux.serving.parts import AnswerReader, Dialect, dialect_of
from loramux.serving.tokenizer import (
    TAIL_CHARACTERS,
    RenderedChat,
    TemplateRefusal,
    Tokenizer,
    open_last_message,
    render_accepted,
    template_messages,
)

RENDERINGS, RENDERINGS_PER_TENANT = 16, 2
"""Templates that are rendered at a time; each is a process."""
CHEAP_SECONDS = 0.005
"""Processor time of one rendering that is not counted: templates of published models take one to three ms."""
MAX_SECONDS, SECONDS_PER_SECOND = 1.0, 0.1
"""Additional processor time that a tenant's templates may take at once, and the time that the tenant gets back in each
second.
"""
KEPT_FORMATS = 1024
"""Maximum number of formats that are kept. A format takes the size of its bundle, because its tokenizer shares the
base's model.
"""
MAX_CONSTRAINT_BYTES = 256 << 10
"""Largest format or set of tools of a request, in bytes of JSON."""
MAX_KEPT_OF_TENANT, MAX_KEPT = 64, 2048
"""Maximum number of results of trials that are kept: of one tenant, and in total."""
TRIAL_PROCESSES = 2
TRIAL_LIMITS = JobLimits(memory_bytes=256 << 20, cpu_seconds=0.75, wall_seconds=2.0)
INVALID_CONSTRAINT = "invalid_constraint"


@dataclass(frozen=True, slots=True)
class Format:
    """Conversion between texts and tokens for one revision or the base."""

    tokenizer: Tokenizer
    bundle: Bundle = NO_BUNDLE
    tool_parser: str | None = None
    """Notation of the base's calls of tools; None: the template's notation. The bundle's choice has priority."""

    @property
    def dialect(self) -> Dialect:
        """Notation of the model's thoughts and calls."""
        template = self.bundle.chat_template or self.tokenizer.chat_template
        return dialect_of(template, self.bundle.tool_parser or self.tool_parser)

    def chat_options(self, asked: GenerationRequest) -> ChatOptions:
        """Return the options of a conversation, with the template's variables for the requested effort."""
        effort = asked.chat.effort
        if effort is None:
            return asked.chat
        return replace(asked.chat, template={**self.dialect.effort_fields(effort), **asked.chat.template})

    def tool_grammar(self, use: ToolUse) -> ToolGrammar:
        """Return the tools in the notation of the model. Raises InvalidRequest."""
        style = self.dialect.tools
        if style is None:
            message = (
                "'tools' is not supported: the model's chat template takes none that this server can read. "
                "Leave it out; model.tool_parser, or an adapter's tool_parser, may name the way it calls."
            )
            raise InvalidRequest(message, field="tools", code="unsupported_parameter")
        return ToolGrammar(use=use, style=style, special=self.tokenizer.grammar_tokens(style.markers))

    def behind_thought(self, constraint: Constraint, prompt_tail: str | None, *, may_call: bool) -> Constraint:
        """Return a constraint that begins after the answer's thought, if the answer may have a thought. Raises
        InvalidRequest.

        A call within the thought ends the thought.
        """
        dialect, field = self.dialect, constraint.field
        if prompt_tail is None or dialect.thought is None or not dialect.may_think(prompt_tail):
            return constraint
        opening, after = map(self.tokenizer.token_id, dialect.thought)
        if dialect.begins_in_thought(prompt_tail):
            if after is None:
                end = dialect.thought[1]
                message = f"'{field}' is not supported while the model thinks: '{end}' is no single token."
                raise InvalidRequest(message, field=field, code="unsupported_parameter")
            return msgspec.structs.replace(constraint, after=after, entry=self._entry(may_call=may_call))
        if opening is None or after is None:
            return constraint  # the model answers without a thought
        return msgspec.structs.replace(constraint, opening=opening, after=after, entry=self._entry(may_call=may_call))

    def _entry(self, *, may_call: bool) -> int | None:
        """Return the token that begins a call; None if calls are not allowed, or do not begin with a single token."""
        style = self.dialect.tools
        return self.tokenizer.token_id(style.begin) if may_call and style is not None else None

    def reader(self, asked: GenerationRequest, prompt_tail: str | None) -> AnswerReader | None:
        """Return the reader of one answer; None if the whole answer is text."""
        dialect, may_call = self.dialect, asked.chat.tools is not None
        if prompt_tail is None or not (may_call or dialect.thought):
            return None
        return AnswerReader(
            dialect,
            in_thought=dialect.begins_in_thought(prompt_tail),
            may_think=dialect.may_think(prompt_tail),
            may_call=may_call,
            use=asked.chat.tools,
            may_be_json=asked.format is not None,
            special={token: text for text, token in self.tokenizer.special_tokens(dialect.markers).items()},
        )

    @property
    def classes(self) -> Classes:
        """Classes of a classifier."""
        return Classes(self.bundle.labels, self.bundle.problem_type, self.bundle.num_labels)

    @property
    def num_tokens(self) -> int:
        """The largest token id that the revision has added, plus one; 0 without added tokens."""
        return max((token.id + 1 for token in self.bundle.added_tokens), default=0)

    def apply_defaults(self, asked: GenerationRequest, of_base: SamplingDefaults) -> GenerationRequest:
        """Fill in the fields that the caller left out: from the bundle, or else from the base's recommendations
        `of_base`.
        """
        own, recommended = msgspec.structs.asdict(self.bundle.sampling), msgspec.structs.asdict(of_base)
        values = {name: recommended[name] if own[name] is None else own[name] for name in own}
        found = {name: value for name, value in values.items() if name in asked.left_out and value is not None}
        sampling = msgspec.structs.replace(asked.sampling, **found) if found else asked.sampling
        return replace(
            asked,
            sampling=sampling,
            stop=asked.stop or self.bundle.stop,
            prompts=tuple(map(self._with_system_prompt, asked.prompts)),
        )

    def _with_system_prompt(self, prompt: Any) -> Any:
        first = self.bundle.system_prompt
        if first is None or not isinstance(prompt, tuple) or (prompt and prompt[0].role in ("system", "developer")):
            return prompt
        return (Message("system", first), *prompt)


class ProcessorBudget:
    """Processor time of each tenant's expensive templates: a bucket that fills at SECONDS_PER_SECOND."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: dict[str, tuple[float, float]] = {}
        """Seconds that a tenant has not got back yet, and the time of which this is true."""

    def check(self, tenant: str) -> None:
        """Raise TemplateTooExpensive while the tenant's bucket is empty."""
        if (over := self._owed(tenant) - MAX_SECONDS) > 0:
            raise TemplateTooExpensive(math.ceil(over / SECONDS_PER_SECOND))

    def charge(self, tenant: str, cpu_seconds: float) -> None:
        """Take the processor time of one rendering."""
        if (owed := self._owed(tenant) + max(0.0, cpu_seconds - CHEAP_SECONDS)) > 0:
            self._spent[tenant] = owed, self._clock()
        else:
            self._spent.pop(tenant, None)

    def _owed(self, tenant: str) -> float:
        owed, at = self._spent.get(tenant, (0.0, 0.0))
        return max(0.0, owed - (self._clock() - at) * SECONDS_PER_SECOND)


class TemplateTooExpensive(Unavailable):
    """The tenant's chat templates have used up their processor time."""

    code = "chat_template_too_expensive"
    status = HTTPStatus.TOO_MANY_REQUESTS

    def __init__(self, seconds: int) -> None:
        super().__init__(
            f"Your adapters' chat templates take more than {CHEAP_SECONDS * 1000:g} ms of processor time each, and "
            f"have used up your share of {SECONDS_PER_SECOND:g} s a second. Retry in {seconds} s, or simplify them."
        )
        self.retry_after = seconds


class Formats:
    """Makes formats at their first use, and renders conversations with them."""

    def __init__(self, renderer: TemplateRenderer) -> None:
        self._renderer = renderer
        self._kept: OrderedDict[tuple[str, str], Format] = OrderedDict()
        """Formats by base and digest."""
        self._threads = ThreadPool("templates", RENDERINGS, RENDERINGS_PER_TENANT)
        self._budget = ProcessorBudget()

    async def of(self, base: str, of_base: Format, revision: Revision | None, tenant: str) -> Format:
        """Return the format of a revision, or of the base, whose own format is a parameter. `tenant` is the caller's
        tenant.
        """
        if revision is None:
            return of_base
        key = base, revision.digest
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = await self._threads.run(tenant, _read, of_base, revision)
            if len(self._kept) > KEPT_FORMATS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return found

    def forget_base(self, base: str) -> None:
        """Drop all formats of a base that is unloaded: because another base may be added under the same name."""
        for key in [key for key in self._kept if key[0] == base]:
            del self._kept[key]

    async def encode_chat(
        self, format: Format, conversation: Conversation, options: ChatOptions, limit: int, tenant: str
    ) -> RenderedChat:
        """Return the token ids of the conversation, up to the assistant's answer.

        For `limit` and `tenant` see `Tokenizer.encode`. Raises InvalidRequest if the template refuses the conversation,
        and Unavailable if no process can be started.
        """
        bundle, tokenizer = format.bundle, format.tokenizer
        if bundle.chat_template is None:
            return await tokenizer.encode_chat(conversation, limit, tenant, options)
        if taken := sorted(bundle.special_tokens.keys() & options.template.keys()):
            field = f"chat_template_kwargs.{taken[0]}"
            raise InvalidRequest(f"'{field}' is set by the adapter; leave it out.", field=field)
        self._budget.check(tenant)
        meters, characters = list[JobMeter](), tokenizer.longest_token * limit
        render = partial(self._render, bundle, options=options, characters=characters, meters=meters)
        try:
            text, form = await self._threads.run(tenant, render_accepted, conversation, render)
        except SandboxDied as error:
            raise Unavailable("Chat templates cannot be rendered at present. Please retry.") from error
        finally:
            for meter in meters:
                self._budget.charge(tenant, meter.cpu_seconds)
        if options.ending == "open_message":
            text = open_last_message(text, form)
        if options.image_texts is not None:
            text = text.replace(*options.image_texts)
        token_ids = await tokenizer.encode(text, limit, tenant, add_special_tokens=options.add_special_tokens)
        return RenderedChat(token_ids, text[-TAIL_CHARACTERS:])

    def _render(
        self, bundle: Bundle, conversation: Conversation, options: ChatOptions, characters: int, meters: list[JobMeter]
    ) -> str:
        """Render a revision's own template, and add the used time to `meters`. Runs on a thread.

        Raises InvalidRequest, or SandboxDied if no process can be started now.
        """
        assert bundle.chat_template is not None, "the revision has a template"
        more = {**options.template, "add_generation_prompt": options.ending == "generation_prompt"}
        variables = template_variables(bundle.special_tokens, template_messages(conversation), **more)
        try:
            with metered() as meter:
                meters.append(meter)
                return self._renderer.render(bundle.chat_template, variables, characters)
        except TemplateFailed as failed:
            kind = TemplateRefusal if failed.fault == "refused" else InvalidRequest
            raise kind(
                f"The adapter's chat template gives no prompt for these messages: {failed.reason}.",
                field="messages",
                code="chat_template_failed",
            ) from None

    def close(self) -> None:
        """End the threads."""
        self._threads.close()


def _read(of_base: Format, revision: Revision) -> Format:
    bundle, tokenizer = read_bundle(Path(revision.directory)), of_base.tokenizer
    extended = tokenizer.extended(bundle.added_tokens) if bundle.added_tokens else tokenizer
    if bundle.pooling is None:
        bundle = msgspec.structs.replace(bundle, pooling=of_base.bundle.pooling)
    return Format(extended, bundle, of_base.tool_parser)


class _Key(NamedTuple):
    tenant: str
    job: bytes


class GrammarTrials:
    """Turns requested formats into constraints. Each new constraint is tried first, one at a time for each tenant."""

    def __init__(self, tokenizer: Tokenizer, facts: ModelFacts, white_space: WhiteSpace = "bounded") -> None:
        self._setup = _setup(tokenizer, facts, white_space)
        self._sandbox = Sandbox("loramux.constraints.grammars", self._setup or b"")
        self._threads = ThreadPool("grammars", TRIAL_PROCESSES, 1)
        self._slots = TenantSlots(TRIAL_PROCESSES, 1)
        self._kept: OrderedDict[_Key, TrialResult] = OrderedDict()
        """Results of trials, the latest used last."""

    async def constraint(self, tenant: str, asked: TrialJob, field: str) -> Constraint:
        """Return the constraint that `field` requests. Raises InvalidRequest if the limits do not allow it."""
        if self._setup is None:
            raise InvalidRequest(
                f"'{field}' is not supported with this model's tokenizer; leave it out.",
                field=field,
                code="unsupported_parameter",
            )
        job = msgspec.json.encode(asked)
        if len(job) > MAX_CONSTRAINT_BYTES:
            raise InvalidRequest(
                f"'{field}' has {len(job)} bytes, and at most {MAX_CONSTRAINT_BYTES} are allowed. Send a smaller one.",
                field=field,
                code=INVALID_CONSTRAINT,
            )
        result = await self._result(_Key(tenant, job))
        if result.refusal is not None:
            raise InvalidRequest(
                f"'{field}' cannot be enforced: {result.refusal}. Simplify it, or leave it out.",
                field=field,
                code=INVALID_CONSTRAINT,
            )
        return Constraint(grammar=result.grammar, field=field)

    async def constraint_of(
        self, tenant: str, format: Format, asked: GenerationRequest, prompt_tail: str | None
    ) -> Constraint | None:
        """Return the constraint of every answer to a request; None without a constraint. Raises InvalidRequest."""
        use = asked.chat.tools
        if use is None and asked.format is None:
            return None
        job = TrialJob(
            format=asked.format.format if asked.format else None,
            tools=format.tool_grammar(use) if use else None,
        )
        field = asked.format.field if asked.format else "tools"
        constraint = await self.constraint(tenant, job, field)
        return format.behind_thought(constraint, prompt_tail, may_call=use is not None)

    def close(self) -> None:
        """End the process and the threads."""
        self._sandbox.close()
        self._threads.close()

    async def _result(self, key: _Key) -> TrialResult:
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        async with self._slots.slot(key.tenant):
            if key not in self._kept:  # another request may have tried the same format
                self._keep(key, await self._threads.run(key.tenant, self._try, key.job))
        return self._kept[key]

    def _try(self, job: bytes) -> TrialResult:
        try:
            return msgspec.json.decode(self._sandbox.run(job, TRIAL_LIMITS).value, type=TrialResult)
        except SandboxDied:
            raise Unavailable("Formats cannot be checked at this moment. Please retry.", code="server_busy") from None
        except SandboxError:
            asked = msgspec.json.decode(job, type=TrialJob)
            if (loose := asked.loosened()) != asked:
                return self._try(msgspec.json.encode(loose))
            limit = f"{TRIAL_LIMITS.cpu_seconds} seconds"
            return TrialResult(refusal=f"it takes more than {limit} or too much memory to compile")

    def _keep(self, key: _Key, result: TrialResult) -> None:
        self._kept[key] = result
        own = [one for one in self._kept if one.tenant == key.tenant]
        if len(own) > MAX_KEPT_OF_TENANT:
            del self._kept[own[0]]
        elif len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)


def _setup(tokenizer: Tokenizer, facts: ModelFacts, white_space: WhiteSpace) -> bytes | None:
    """Return the vocabulary for the trials; None if grammars cannot read it."""
    if (serialized := tokenizer.serialized) is None:
        return None
    vocabulary = TrialSetup(
        tokenizer=serialized,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        white_space=white_space,
    )
    return msgspec.json.encode(vocabulary)
