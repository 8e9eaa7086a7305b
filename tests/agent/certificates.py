"""Certificates made for a test, by an authority of its own or by themselves."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

NOW = dt.datetime.now(dt.UTC)


@dataclass(frozen=True)
class Pair:
    """Files of a certificate and its key, and of who signed it."""

    cert: Path
    key: Path
    authority: Path


def _signed(
    name: str, key: ec.EllipticCurvePrivateKey, by: tuple[str, ec.EllipticCurvePrivateKey], **options: object
) -> x509.Certificate:
    begin, end = options.get("begin", NOW - dt.timedelta(days=1)), options.get("end", NOW + dt.timedelta(days=2))
    assert isinstance(begin, dt.datetime)
    assert isinstance(end, dt.datetime)
    hosts = options.get("hosts", ())
    assert isinstance(hosts, tuple)
    subject, issuer = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in (name, by[0]))
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=not hosts or name == by[0], path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by[1].public_key()), critical=False)
    )
    if hosts:
        names = [_general(host) for host in hosts]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(by[1], hashes.SHA256())


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def make_pair(
    folder: Path, *hosts: str, signed: bool = False, password: bytes | None = None, **options: object
) -> Pair:
    """A certificate for hosts, by an authority of its own if ``signed``, and its key."""
    folder.mkdir(parents=True, exist_ok=True)
    key, authority = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    by = ("authority", authority) if signed else ("agent", key)
    pair = Pair(folder / "cert.pem", folder / "key.pem", folder / "authority.pem")
    pair.cert.write_bytes(_signed("agent", key, by, hosts=hosts, **options).public_bytes(Encoding.PEM))
    ca = _signed("authority", authority, ("authority", authority)).public_bytes(Encoding.PEM)
    pair.authority.write_bytes(ca if signed else pair.cert.read_bytes())
    encryption = NoEncryption() if password is None else BestAvailableEncryption(password)
    pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    pair.key.chmod(0o600)
    return pair
