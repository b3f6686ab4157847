"""The path of requests for completions to the engine and back, without HTTP and SQL."""
