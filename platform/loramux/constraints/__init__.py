"""Formats that answers must have, written as grammars of llguidance.

A request asks for a format (any JSON object, a JSON schema, a regular expression, one of some texts, or a grammar) or
offers tools. `formats` and `tools` write both as a grammar, in four layers:

    schemas      what of a JSON schema can be enforced values       JSON of a schema notations    arguments of calls in
    Python, XML and Gemma's notation, for writers and readers grammars     compiles and follows a grammar in a limited
    process before an engine does: because it is untrusted code

The engine follows a grammar in `engine.execution.constraints`.
"""
