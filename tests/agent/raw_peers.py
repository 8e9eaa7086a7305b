"""Peers below HTTP: a socket that does whatever a test says, and a cable that breaks where a test says."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def read_request(connection: socket.socket) -> bytes:
    """One request, head and body, exactly as it came."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := connection.recv(65536)):
            return data
        data += more
    head = data.partition(b"\r\n\r\n")[0]
    length = next(
        (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
    )
    while len(data) < len(head) + 4 + length:
        if not (more := connection.recv(65536)):
            break
        data += more
    return data


@contextmanager
def raw_peer(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yield the address of a server that runs ``talk`` for every connection, one after the other."""
    ending = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    if ending.is_set():
                        return
                    talk(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        yield f"http://127.0.0.1:{port}"
        ending.set()
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=60).close()
        thread.join(60)
        assert not thread.is_alive()


class Cable:
    """A TCP proxy; while :attr:`limits` is set, each new connection breaks after so many bytes."""

    def __init__(self, upstream_port: int) -> None:
        self.limits: tuple[int | None, int | None] = (None, None)
        """Bytes to the service, and bytes back, that get through; ``None``: all."""
        self.passed = [0, 0]
        """Of the latest connection."""
        self.on_limit: Callable[[], object] = lambda: None
        """Called just before a connection breaks."""
        self._upstream = ("127.0.0.1", upstream_port)

    def talk(self, near: socket.socket) -> None:
        self.passed = [0, 0]
        limits = self.limits
        with socket.create_connection(self._upstream) as far:
            ends = (near, far)

            def cut() -> None:
                for end in ends:
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)

            def pump(way: int) -> None:
                source, target = ends[way], ends[1 - way]
                limit = limits[way]
                if limit == 0:
                    self.on_limit()
                    cut()
                with contextlib.suppress(OSError):
                    while data := source.recv(65536):
                        if limit is not None:
                            data = data[: limit - self.passed[way]]
                        target.sendall(data)
                        self.passed[way] += len(data)
                        if self.passed[way] == limit:
                            self.on_limit()
                            break
                cut()

            threads = [threading.Thread(target=pump, args=(way,), daemon=True) for way in (0, 1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
