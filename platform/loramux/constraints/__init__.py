"""Formats that answers must have, as grammars of llguidance.

A request asks for a format (any JSON object, a JSON schema, a regular expression, one of some texts, or a grammar) or
offers tools. `formats` and `tools` write both as a grammar, and `grammars` compiles and follows a grammar in a limited
process before an engine does: a grammar is a stranger's code. The engine follows it in `engine.execution.constraints`.
"""

from loramux.constraints.formats import AnswerFormat, Choice, Grammar, GrammarText, JsonObject, JsonSchema, Regex
from loramux.constraints.grammars import ToolGrammar, TrialJob, TrialResult, TrialSetup
from loramux.constraints.tools import STYLES, Tool, ToolStyle, ToolUse, choose_style

__all__ = [
    "STYLES",
    "AnswerFormat",
    "Choice",
    "Grammar",
    "GrammarText",
    "JsonObject",
    "JsonSchema",
    "Regex",
    "Tool",
    "ToolGrammar",
    "ToolStyle",
    "ToolUse",
    "TrialJob",
    "TrialResult",
    "TrialSetup",
    "choose_style",
]
