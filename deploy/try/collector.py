"""An OTLP receiver for deploy/try.sh: each span that arrives over HTTP becomes a line of JSON in a file.

python collector.py PORT FILE
"""

from __future__ import annotations

import http.server
import json
import sys
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Receiver(http.server.BaseHTTPRequestHandler):
    """Handler of POST /v1/traces of the OTLP protocol."""

    file: Path

    def do_POST(self) -> None:
        """Append the request's spans to the file."""
        sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        spans = [span for one in sent.resource_spans for two in one.scope_spans for span in two.spans]
        with self.file.open("a") as file:
            for span in spans:
                found = {
                    "trace": span.trace_id.hex(),
                    "span": span.span_id.hex(),
                    "parent": span.parent_span_id.hex(),
                    "name": span.name,
                    "start_ns": span.start_time_unix_nano,
                    "end_ns": span.end_time_unix_nano,
                }
                file.write(json.dumps(found) + "\n")
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write nothing."""


if __name__ == "__main__":
    Receiver.file = Path(sys.argv[2])
    Receiver.file.touch()
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver).serve_forever()
