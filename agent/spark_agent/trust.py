"""Whether a manifest may be believed: signed by the service's pinned key, unaltered since.

Trust on first use: the first key of a service is pinned and said aloud. From then on an unsigned manifest, a wrong
signature and another key are refused (exit code 3), but a key that the pinned one vouches for takes its place.
``SPARKMOE_SIGNING_KEY`` pins a key up front, for every service.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from spark_agent.env import Environment
from spark_agent.errors import RefusedError
from spark_agent.paths import service_keys_dir
from spark_agent.service_keys import KeyRing, PinnedKey
from spark_agent.signatures import SignedBy, keys_leading_to, verifies
from spark_schemas.signature import Signature, SigningKeyInfo, key_id_of

__all__ = ["ManifestTrust"]

_PULL_AGAIN = "pull it again: spark pull-profile NAME"


class _Service(Protocol):
    base_url: str

    def signing_key(self) -> SigningKeyInfo: ...


class ManifestTrust:
    """Decides by what this machine has pinned."""

    def __init__(self, ring: KeyRing, given: str | None = None) -> None:
        """``given`` is a key in base64 that a person named up front; it counts alone then, and nothing is pinned."""
        self._ring = ring
        self._given = given

    @classmethod
    def of_this_machine(cls, environment: Environment | None = None) -> ManifestTrust:
        """By the environment and the pinned keys of this machine."""
        found = Environment.read() if environment is None else environment
        return cls(KeyRing(service_keys_dir()), found.signing_key)

    def check_answer(
        self, service: _Service, content: bytes, header: str | None, say: Callable[[str], None], *, pin: bool = True
    ) -> SignedBy | None:
        """Check a service's answer before anything of it is kept; ``None`` for an unsigned one that may be.

        ``say`` gets what a person should know. ``pin=False`` decides the same and keeps nothing. Raises
        :class:`RefusedError`.
        """
        url = service.base_url
        trusted = self._trusted(url)
        if header is None:
            if trusted is not None:
                raise RefusedError(
                    f"the manifest from {url} is not signed, expected a signature by key {trusted.key_id}, "
                    "which is pinned for this service",
                    f"ask who runs the service; if it really stopped signing: spark service-key forget --service {url}",
                )
            say(f"{url} does not sign its manifests: nothing proves where this one comes from")
            return None
        signature = _parsed(header, url)
        if trusted is not None and signature.key_id == trusted.key_id:
            return self._verified(url, trusted.key, content, signature)
        info = service.signing_key()
        if info.key_id != key_id_of(info.key) or info.key_id != signature.key_id:
            raise RefusedError(
                f"the manifest from {url} is signed by key {signature.key_id}, but the service shows {info.key_id}",
                "try again; if it stays, ask who runs the service",
            )
        signed = self._verified(url, info.key, content, signature)
        self._accept_key(url, trusted, info, say, pin=pin)
        return signed

    def check_stored(self, content: bytes, signed: SignedBy) -> None:
        """Check a kept manifest against the signature kept with it. Raises :class:`RefusedError`.

        On a machine that has pinned no key of the service this shows that nobody altered the file, not who signed it.
        """
        trusted = self._trusted(signed.service_url)
        if trusted is not None and signed.key not in trusted.all_keys:
            raise RefusedError(
                f"the manifest is signed by key {key_id_of(signed.key)}, expected {trusted.key_id}, "
                f"which is pinned for {signed.service_url}",
                _PULL_AGAIN,
            )
        if not signed.covers(content):
            raise RefusedError("the manifest was altered after it was signed: its signature does not fit", _PULL_AGAIN)

    def check_pinned(self, content: bytes, signed: SignedBy) -> None:
        """As :meth:`check_stored`, for bytes that anybody may send: a key of the service must be pinned here.

        Raises :class:`RefusedError`.
        """
        if self._trusted(signed.service_url) is None:
            raise RefusedError(
                f"no key of {signed.service_url} is pinned on this machine, so nothing proves who signed the manifest",
                "pull a profile from it first: spark pull-profile NAME",
            )
        self.check_stored(content, signed)

    def check_unsigned(self, service_url: str) -> None:
        """Refuse a kept manifest without a signature when its service is known to sign."""
        trusted = self._trusted(service_url)
        if trusted is not None:
            raise RefusedError(
                f"the manifest has no signature, expected one by key {trusted.key_id}, "
                f"which is pinned for {service_url}",
                _PULL_AGAIN,
            )

    def _trusted(self, service_url: str) -> PinnedKey | None:
        if self._given is not None:
            return PinnedKey(service_url=service_url, key=self._given)
        return self._ring.get(service_url)

    def _verified(self, url: str, key: str, content: bytes, signature: Signature) -> SignedBy:
        if not verifies(key, content, signature):
            raise RefusedError(
                f"the manifest from {url} was altered on its way: its signature by key {signature.key_id} does not fit",
                "try again; if it stays, something between this machine and the service changes answers",
            )
        return SignedBy(service_url=url, key=key, signature=signature.header())

    def _accept_key(
        self, url: str, trusted: PinnedKey | None, info: SigningKeyInfo, say: Callable[[str], None], *, pin: bool
    ) -> None:
        if trusted is None:
            say(
                f"first manifest from {url}: {'pinned' if pin else 'would pin'} its key {info.key_id} "
                "(the same as `spark-service key show` there?)"
            )
            new = PinnedKey(service_url=url, key=info.key)
        else:
            way = keys_leading_to(trusted.key, info)
            if way is None:
                raise RefusedError(
                    f"{url} signs with key {info.key_id}, expected {trusted.key_id}, which is pinned for it; "
                    "the pinned key does not vouch for the other",
                    "ask who runs the service whether the key was replaced, compare `spark-service key show`, then: "
                    f"spark service-key trust {info.key_id} --service {url}",
                )
            say(f"{url} rotated its key: {trusted.key_id} vouches for {info.key_id}")
            if self._given is not None:
                say(f"set SPARKMOE_SIGNING_KEY to {info.key}")
            new = PinnedKey(service_url=url, key=info.key, earlier=(*trusted.earlier, *way))
        if pin and self._given is None:
            self._ring.put(new)


def _parsed(header: str, url: str) -> Signature:
    try:
        return Signature.parse(header)
    except ValueError as error:
        raise RefusedError(
            f"the signature of the manifest from {url} cannot be read: {error}",
            "bring agent and service to the same version of spark-moe",
        ) from error
