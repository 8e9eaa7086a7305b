"""TLS of the agent's own API: what a person's certificate and key are good for, and how clients here trust it.

Commands on this machine know an agent by its file (:mod:`spark_agent.running`), which holds the digest of its
certificate: whatever names that has, and whoever signed it, they talk to that agent and nobody else.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import ipaddress
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spark_agent.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
    from cryptography.x509 import Certificate

__all__ = ["ClientTls", "ServerTls", "read_server_tls"]

_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerTls:
    """A certificate and its key, which fit each other."""

    cert_file: Path
    key_file: Path
    digest: str
    """SHA-256 of the certificate, hex."""
    names: tuple[str, ...]
    """Host names that it is for, without patterns."""
    addresses: tuple[str, ...]
    """IP addresses that it is for."""
    self_signed: bool

    def context(self) -> ssl.SSLContext:
        """What the server speaks by."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.cert_file, self.key_file)
        return context

    def host_for(self, address: str) -> str:
        """The name by which clients reach an address of this machine, one of the certificate's if there is one."""
        if address in self.addresses:
            return address
        if ipaddress.ip_address(address).is_loopback:
            return "localhost" if "localhost" in self.names else address
        return self.names[0] if self.names else address

    def covers(self, host: str) -> bool:
        """Whether the certificate is for a host."""
        return host in self.names or host in self.addresses


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How a server is trusted: by its very certificate, or by who signed it."""

    digest: str | None = None
    """SHA-256 of the certificate, hex: it is this one or none."""
    ca_file: Path | None = None
    """Who may have signed it, PEM; ``None``: whom this machine trusts."""

    def context(self) -> ssl.SSLContext:
        """What a client speaks by; raises :class:`ConfigError` for a file that holds no certificates."""
        if self.digest is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            # Names and signatures say less than the digest, which is checked before anything is sent.
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return context
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"--tls-ca-file {self.ca_file}: {getattr(error, 'strerror', None) or error}",
                "expected a file of certificates as PEM text",
            ) from error

    def check(self, certificate: bytes | None) -> None:
        """Raise :class:`ssl.SSLError` where another certificate (DER) than the known one was shown."""
        if self.digest is not None and hashlib.sha256(certificate or b"").hexdigest() != self.digest:
            raise ssl.SSLError("another certificate than that of the agent: another program answers there")


def read_server_tls(
    cert_file: Path | None, key_file: Path | None, warn: Callable[[str], None], now: dt.datetime | None = None
) -> ServerTls | None:
    """The certificate and key that a person named, ``None`` if none.

    Raises :class:`UsageError` for one without the other, :class:`ConfigError` for what cannot be read or does not fit.
    ``warn`` is told of a certificate out of its time and of a key that others may read.
    """
    if cert_file is None and key_file is None:
        return None
    if cert_file is None or key_file is None:
        missing = "--tls-cert-file" if cert_file is None else "--tls-key-file"
        raise UsageError(f"TLS needs a certificate and its key: {missing} is missing", f"name both; add {missing} FILE")
    certificates = _certificates(cert_file)
    key = _key(key_file, warn)
    certificate = certificates[0]
    if _public_bytes(key.public_key()) != _public_bytes(certificate.public_key()):
        raise ConfigError(
            f"the key {key_file} is not that of the certificate {cert_file}",
            "name the pair that was made together; in a chain the server's own certificate comes first",
        )
    _warn_of_time(certificate, cert_file, warn, now or dt.datetime.now(dt.UTC))
    names, addresses = _hosts_of(certificate)
    found = ServerTls(
        cert_file.absolute(),
        key_file.absolute(),
        hashlib.sha256(_der(certificate)).hexdigest(),
        names,
        addresses,
        certificate.issuer == certificate.subject,
    )
    try:
        found.context()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"OpenSSL does not take {cert_file} with {key_file}: {error}", "make a new pair") from error
    return found


def _read(path: Path, option: str) -> bytes:
    try:
        if not path.is_file():
            raise ConfigError(
                f"{option} {path}: {'no regular file' if path.exists() else 'no such file'}", "check the path"
            )
        content = path.read_bytes() if path.stat().st_size <= _MAX_FILE_BYTES else b""
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}", "check its permissions") from error
    if not content:
        raise ConfigError(f"{option} {path}: found no PEM text of at most {_MAX_FILE_BYTES} bytes", "check the path")
    return content


def _certificates(path: Path) -> list[Certificate]:
    from cryptography import x509

    content = _read(path, "--tls-cert-file")
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise ConfigError(
            f"--tls-cert-file {path}: found no certificate as PEM text", _swapped(content, b"PRIVATE KEY")
        ) from error


def _key(path: Path, warn: Callable[[str], None]) -> PrivateKeyTypes:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    content = _read(path, "--tls-key-file")
    if b"ENCRYPTED" in content:
        raise ConfigError(
            f"the key {path} is encrypted: nobody could type its password at every start",
            f"write it without one, readable by its owner only: (umask 077; openssl pkey -in {path} -out key.pem)",
        )
    try:
        key = load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"--tls-key-file {path}: found no private key as PEM text", _swapped(content, b"CERTIFICATE")
        ) from error
    if path.stat().st_mode & stat.S_IROTH:
        warn(f"the key {path} can be read by everybody on this machine: chmod 600 {path}")
    return key


def _swapped(content: bytes, other: bytes) -> str:
    if b"-----BEGIN " in content and other in content:
        return "are --tls-cert-file and --tls-key-file swapped?"
    return "expected text that begins with -----BEGIN"


def _public_bytes(key: object) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    found: bytes = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined]
    return found


def _der(certificate: Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.DER)


def _warn_of_time(certificate: Certificate, path: Path, warn: Callable[[str], None], now: dt.datetime) -> None:
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        warn(f"the certificate {path} expired on {end:%Y-%m-%d}: clients will refuse it")
    elif now < begin:
        warn(f"the certificate {path} only counts from {begin:%Y-%m-%d} on: clients will refuse it")


def _hosts_of(certificate: Certificate) -> tuple[tuple[str, ...], tuple[str, ...]]:
    from cryptography import x509

    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return (), ()
    names = tuple(name for name in found.get_values_for_type(x509.DNSName) if "*" not in name)
    return names, tuple(map(str, found.get_values_for_type(x509.IPAddress)))
