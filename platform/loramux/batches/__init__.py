"""Files, and batches of requests that run when there is room: OpenAI's /v1/files and /v1/batches below HTTP."""
