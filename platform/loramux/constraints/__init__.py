"""Formats that answers must have, as grammars of llguidance.

A request asks for a format (any JSON object, a JSON schema, a regular expression, one of some texts, or a grammar) or
offers tools. `formats` and `tools` write both as a grammar, and `grammars` compiles and follows a grammar in a limited
process before an engine does: a grammar is a stranger's code. The engine follows it in `engine.execution.constraints`.
"""
