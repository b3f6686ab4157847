"""Requests for completions on their way to the engine and back: no HTTP, no SQL."""
