"""DSPy: programs over chat completions and Responses, with its own adapters and with JSON."""

import asyncio

import dspy
import steps

FIELDS = "Say <<[[ ## answer ## ]]\n{}\n\n[[ ## completed ## ]]>>"


def of(kind: str) -> dict:
    def lm(key: str = steps.KEY) -> dspy.LM:
        return dspy.LM(
            f"openai/{steps.MODEL}", api_base=f"{steps.URL}/v1", api_key=key, model_type=kind, cache=False,
            num_retries=0, max_tokens=4096,
        )  # fmt: skip

    def ask(signature: object, text: str, adapter: object = None, **more: object) -> object:
        with dspy.context(lm=lm(), adapter=adapter or dspy.ChatAdapter(use_json_adapter_fallback=False)):
            return dspy.Predict(signature)(question=text, **more)

    async def streamed() -> None:
        with dspy.context(lm=lm(), adapter=dspy.ChatAdapter()):
            listener = dspy.streaming.StreamListener(signature_field_name="answer")
            program = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=[listener])
            pieces = [piece async for piece in program(question=FIELDS.format("Hello there."))]
        said = "".join(piece.chunk for piece in pieces if isinstance(piece, dspy.streaming.StreamResponse))
        assert said.startswith("Hello there."), said  # one chunk may end with the mark of the next field

    def typed() -> None:
        found = ask("question -> who: str, age: int", steps.JSON, dspy.JSONAdapter())
        steps.expect((found.who, found.age), ("Ada", 36))

    def second_turn() -> None:
        history = dspy.History(messages=[{"question": "Hi", "answer": "Hello there."}])
        signature = dspy.Signature("question: str, history: dspy.History -> answer: str")
        steps.expect(ask(signature, FIELDS.format("It goes on."), history=history).answer, "It goes on.")

    return {
        "turn": lambda: steps.expect(ask("question -> answer", FIELDS.format("Hello there.")).answer, "Hello there."),
        "stream": lambda: asyncio.run(streamed()),
        "JSON": typed,
        "second turn": second_turn,
        "wrong key": lambda: steps.fails(lambda: lm("sk-wrong")("hi"), "Incorrect API key"),
        "too long": lambda: steps.fails(lambda: lm()(steps.LONG), "context"),
    }


steps.run(chat=of("chat"), responses=of("responses"))
