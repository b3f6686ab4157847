"""OpenHands' SDK: its model class and its agent, which runs commands and edits files."""

import tempfile
from pathlib import Path

import steps
from openhands.sdk import LLM, Agent, Conversation, Message, TextContent, Tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool
from pydantic import SecretStr


def llm(key: str = steps.KEY, **more: object) -> LLM:
    return LLM(
        model=f"openai/{steps.MODEL}", base_url=f"{steps.URL}/v1", api_key=SecretStr(key), usage_id="agent",
        num_retries=0, max_output_tokens=4096, **more,
    )  # fmt: skip


def said(text: str, key: str = steps.KEY, **more: object) -> str:
    answer = llm(key, **more).completion([Message(role="user", content=[TextContent(text=text)])])
    return "".join(part.text for part in answer.message.content)


def conversation(folder: str, **more: object) -> tuple[Conversation, list]:
    events: list = []
    tools = [Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)]
    agent = Agent(llm=llm(**more), tools=tools)
    return Conversation(agent=agent, workspace=folder, callbacks=[events.append], visualizer=None), events


def tells(events: list) -> str:
    return events[-1].model_dump_json() if events else ""


def ask(one: Conversation, text: str) -> None:
    one.send_message(text)
    one.run()


def edits() -> None:
    with tempfile.TemporaryDirectory() as folder:
        one, events = conversation(folder)
        path = Path(folder) / "note.txt"
        arguments = f'{{"command": "create", "path": "{path}", "file_text": "from the agent"}}'
        ask(one, f'Do it: <<<tool_call>{{"name": "file_editor", "arguments": {arguments}}}</tool_call>>>')
        steps.expect(path.read_text(), "from the agent")
        ask(one, steps.AGAIN)
        assert any("It goes on." in event.model_dump_json() for event in events), tells(events)


def commands() -> None:
    with tempfile.TemporaryDirectory() as folder:
        one, events = conversation(folder)
        call = '{"name": "terminal", "arguments": {"command": "echo $((40 + 2))-halkodel"}}'
        ask(one, f"Do it: <<<tool_call>{call}</tool_call>>>")
        assert any("42-halkodel" in event.model_dump_json() for event in events), tells(events)


def streamed() -> None:
    pieces = []
    answer = llm(stream=True).completion(
        [Message(role="user", content=[TextContent(text=steps.HELLO)])], on_token=pieces.append
    )
    steps.expect(answer.message.content[0].text, "Hello there.")
    assert pieces, "no piece came"


steps.run(
    chat={
        "turn": lambda: steps.expect(said(steps.HELLO), "Hello there."),
        "stream": streamed,
        "tools": commands,
        "second turn": edits,
        "wrong key": lambda: steps.fails(lambda: said("hi", "sk-wrong"), "Incorrect API key"),
        "too long": lambda: steps.fails(lambda: said(steps.LONG), "context"),
    }
)
