"""Someone between agent and service who may change answers."""

from __future__ import annotations

import http.client
import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Change = Callable[[str, dict[str, str], bytes], tuple[dict[str, str], bytes]]


class Between:
    """Someone between agent and service who may change answers."""

    def __init__(self, target: str) -> None:
        self.target = target.removeprefix("http://")
        self.change: Change = lambda path, headers, body: (headers, body)
        self.wants_bodies = False
        """Ask for whole answers, whatever the agent has."""
        between = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                upstream = http.client.HTTPConnection(between.target, timeout=120)
                kept = {
                    name: value
                    for name, value in self.headers.items()
                    if name.lower() == "if-none-match" and not between.wants_bodies
                }
                upstream.request("GET", self.path, headers=kept)
                answer = upstream.getresponse()
                headers = {name.lower(): value for name, value in answer.getheaders()}
                headers, body = between.change(self.path, headers, answer.read())
                upstream.close()
                self.send_response(answer.status)
                for name, value in (headers | {"content-length": str(len(body))}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def standing_between(target: str) -> Iterator[Between]:
    """Pass on what is asked of a service, until the block ends."""
    made = Between(target)
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
        thread.join()
