"""Certificates and keys that a person names: what is taken, and what is said of others."""

from __future__ import annotations

import datetime as dt
import http.client
import socket
import ssl
import threading
from pathlib import Path

import pytest
from certificates import NOW, make_pair

from spark_agent.agent_client import fetch
from spark_agent.errors import ConfigError, SparkError, UsageError
from spark_agent.running_agent import get_json
from spark_agent.tls import ClientTls, ServerTls, read_server_tls


def read(cert: Path | None, key: Path | None) -> tuple[ServerTls | None, list[str]]:
    said: list[str] = []
    return read_server_tls(cert, key, said.append), said


def test_a_pair(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "localhost", "gpu.example", "*.example", "127.0.0.1", "::1")
    found, said = read(pair.cert, pair.key)
    assert found is not None
    assert (found.names, found.addresses) == (("localhost", "gpu.example"), ("127.0.0.1", "::1"))
    assert found.self_signed
    assert said == []
    assert found.host_for("127.0.0.1") == "127.0.0.1"
    assert found.host_for("127.0.0.2") == "localhost"
    assert found.host_for("10.0.0.7") == "localhost"
    assert (found.covers("gpu.example"), found.covers("other.example")) == (True, False)
    assert not read_signed(tmp_path / "signed").self_signed
    assert read(None, None) == (None, [])


def read_signed(folder: Path, *hosts: str) -> ServerTls:
    pair = make_pair(folder, *(hosts or ("gpu.example",)), signed=True)
    found, _ = read(pair.cert, pair.key)
    assert found is not None
    return found


def test_a_name_for_an_address(tmp_path: Path) -> None:
    found = read_signed(tmp_path)
    assert (found.host_for("10.0.0.7"), found.host_for("127.0.0.1")) == ("gpu.example", "127.0.0.1")
    pair = make_pair(tmp_path / "none", "*.example")
    bare, _ = read(pair.cert, pair.key)
    assert bare is not None
    assert bare.host_for("10.0.0.7") == "10.0.0.7"


def test_what_is_missing_or_does_not_fit(tmp_path: Path) -> None:
    pair, other = make_pair(tmp_path / "one", "localhost"), make_pair(tmp_path / "other", "localhost")
    with pytest.raises(UsageError, match="--tls-key-file is missing"):
        read(pair.cert, None)
    with pytest.raises(UsageError, match="--tls-cert-file is missing"):
        read(None, pair.key)
    with pytest.raises(ConfigError, match="no such file"):
        read(tmp_path / "nowhere", pair.key)
    with pytest.raises(ConfigError, match="no regular file"):
        read(tmp_path, pair.key)
    with pytest.raises(ConfigError, match="is not that of the certificate"):
        read(pair.cert, other.key)
    for cert, key in ((pair.key, pair.cert), (pair.key, pair.key), (pair.cert, pair.cert)):
        with pytest.raises(ConfigError) as error:
            read(cert, key)
        assert "swapped" in str(error.value.hint)
    for content in (
        b"",
        b"\0\xff",
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        b"x" * (2 << 20),
    ):
        broken = tmp_path / "broken.pem"
        broken.write_bytes(content)
        for files in ((broken, pair.key), (pair.cert, broken)):
            with pytest.raises(ConfigError, match="found no"):
                read(*files)


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(tmp_path, "localhost")

    def refused(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(ConfigError, match="Permission denied"):
        read(pair.cert, pair.key)


def test_an_encrypted_key_is_told_how_to_be_opened(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "localhost", password=b"secret")
    with pytest.raises(ConfigError, match="is encrypted") as error:
        read(pair.cert, pair.key)
    assert "openssl pkey -in" in str(error.value.hint)


@pytest.mark.parametrize(
    ("begin", "end", "said"),
    [
        (NOW - dt.timedelta(days=9), NOW - dt.timedelta(days=2), "expired on"),
        (NOW + dt.timedelta(days=2), NOW + dt.timedelta(days=9), "only counts from"),
    ],
)
def test_a_certificate_out_of_its_time_is_warned_of(tmp_path: Path, begin: dt.datetime, end: dt.datetime, said: str):
    pair = make_pair(tmp_path, "localhost", begin=begin, end=end)
    found, (warning,) = read(pair.cert, pair.key)
    assert found is not None
    assert said in warning


def test_a_key_that_everybody_can_read_is_warned_of(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "localhost")
    pair.key.chmod(0o644)
    _, (warning,) = read(pair.cert, pair.key)
    assert "can be read by everybody" in warning


@pytest.fixture
def answering():
    """Starts a server that answers each TLS connection with an empty object, and gives its port."""
    stops = []

    def start(tls: ServerTls) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        heard: list[bytes] = []

        def serve() -> None:
            while True:
                try:
                    plain, _ = listener.accept()
                except OSError:
                    return
                try:
                    with tls.context().wrap_socket(plain, server_side=True) as connection:
                        if request := connection.recv(4096):
                            heard.append(request)
                            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                except OSError:
                    plain.close()

        thread = threading.Thread(target=serve)
        thread.start()

        def stop() -> None:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            thread.join()

        stops.append(stop)
        start.heard = heard
        return listener.getsockname()[1]

    yield start
    for stop in stops:
        stop()


def test_a_known_certificate_is_the_only_one(tmp_path: Path, answering) -> None:
    """Names and dates do not matter then; nothing is said to another one."""
    pair = make_pair(tmp_path / "one", "elsewhere.example", end=NOW - dt.timedelta(hours=1))
    known, _ = read(pair.cert, pair.key)
    other = read_signed(tmp_path / "other", "127.0.0.1")
    assert known is not None
    port = answering(known)
    asked = {"token": "secret", "timeout_s": 10}
    assert fetch("127.0.0.1", port, "GET", "/", tls=ClientTls(known.digest), **asked) == (200, b"{}")
    answering.heard.clear()
    with pytest.raises(ssl.SSLError, match="another certificate"):
        fetch("127.0.0.1", port, "GET", "/", tls=ClientTls(other.digest), **asked)
    assert answering.heard == [], "no key for a stranger"
    with pytest.raises(SparkError, match=r"cannot be trusted: .*another certificate"):
        get_json(f"https://127.0.0.1:{port}", "/health", "secret", ClientTls(other.digest))
    with pytest.raises((OSError, http.client.HTTPException)):
        fetch("127.0.0.1", port, "GET", "/", **asked)


def test_who_signed_it(tmp_path: Path, answering) -> None:
    pair = make_pair(tmp_path / "one", "127.0.0.1", signed=True)
    tls, _ = read(pair.cert, pair.key)
    assert tls is not None
    url = f"https://127.0.0.1:{answering(tls)}"
    assert get_json(url, "/health", None, ClientTls(ca_file=pair.authority)) == {}
    for ca_file in (None, make_pair(tmp_path / "other", "127.0.0.1", signed=True).authority):
        with pytest.raises(SparkError, match=r"cannot be trusted: .*certificate") as error:
            get_json(url, "/health", None, ClientTls(ca_file=ca_file))
        assert "--tls-ca-file" in str(error.value.hint)
    elsewhere = make_pair(tmp_path / "elsewhere", "gpu.example", signed=True)
    tls, _ = read(elsewhere.cert, elsewhere.key)
    assert tls is not None
    with pytest.raises(SparkError, match="cannot be trusted"):
        get_json(f"https://127.0.0.1:{answering(tls)}", "/health", None, ClientTls(ca_file=elsewhere.authority))
    for broken in (tmp_path / "nowhere", pair.key):
        with pytest.raises(ConfigError, match="--tls-ca-file"):
            ClientTls(ca_file=broken).context()
