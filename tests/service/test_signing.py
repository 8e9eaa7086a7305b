from __future__ import annotations

import base64
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from spark_schemas.signature import SigningKeyInfo, key_id_of, rotation_message
from spark_service.errors import SigningKeyError
from spark_service.signing import KEY_NAME, ROTATIONS_NAME, Signer


def verify(key: str, content: bytes, signature: bytes) -> None:
    Ed25519PublicKey.from_public_bytes(base64.b64decode(key)).verify(signature, content)


def chain_of(info: SigningKeyInfo) -> list[str]:
    """Keys from the first to the present one; every step's signature is checked."""
    keys = [info.rotations[0].old_key] if info.rotations else []
    for rotation in info.rotations:
        assert rotation.old_key == keys[-1]
        message = rotation_message(rotation.old_key, rotation.new_key)
        verify(rotation.old_key, message, base64.b64decode(rotation.signature))
        keys.append(rotation.new_key)
    return keys or [info.key]


def test_the_key_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    signer = Signer(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert signer.stamp() is None
    signature = signer.sign(b"body")
    info = signer.info()
    assert (signature.key_id, info.key_id) == (key_id_of(info.key), key_id_of(info.key))
    verify(info.key, b"body", signature.value)
    with pytest.raises(InvalidSignature):
        verify(info.key, b"body ", signature.value)
    assert [path.name for path in tmp_path.iterdir()] == [KEY_NAME]
    assert stat.S_IMODE((tmp_path / KEY_NAME).stat().st_mode) == 0o600
    again = Signer(tmp_path)
    assert again.info() == info
    assert again.sign(b"body") == signature


def test_starts_at_once_agree_on_one_key(tmp_path: Path) -> None:
    found: list[str] = []
    gate = threading.Barrier(8)

    def start() -> None:
        gate.wait()
        found.append(Signer(tmp_path).info().key)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert [path.name for path in tmp_path.iterdir()] == [KEY_NAME]


def test_each_key_vouches_for_the_next(tmp_path: Path) -> None:
    signer = Signer(tmp_path)
    keys = [signer.info().key]
    other = Signer(tmp_path)
    assert other.info().key == keys[0]
    for _ in range(3):
        keys.append(signer.rotate().key)
        # Another process's signer notices.
        assert other.info() == signer.info()
        verify(keys[-1], b"body", other.sign(b"body").value)
    assert len(set(keys)) == 4
    assert chain_of(signer.info()) == keys
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("done_before", [0, 2])
def test_a_rotation_that_is_cut_short_keeps_the_old_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done_before: int
) -> None:
    signer = Signer(tmp_path)
    for _ in range(done_before):
        signer.rotate()
    before = signer.info()
    replace = Path.replace

    def fail(self: Path, target: Path) -> Path:
        if target.name == KEY_NAME:
            raise OSError(28, "No space left on device")
        return replace(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        with pytest.raises(SigningKeyError, match="No space left"):
            signer.rotate()
    assert (tmp_path / ROTATIONS_NAME).exists()
    assert Signer(tmp_path).info() == signer.info() == before
    assert {path.name for path in tmp_path.iterdir()} == {KEY_NAME, ROTATIONS_NAME}
    after = signer.rotate()
    assert chain_of(after)[-2:] == [before.key, after.key]
    assert len(chain_of(after)) == done_before + 2


def test_the_oldest_statements_fall_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_service.signing.MAX_ROTATIONS", 3)
    signer = Signer(tmp_path)
    keys = [signer.rotate().key for _ in range(6)]
    assert chain_of(signer.info()) == chain_of(Signer(tmp_path).info()) == keys[-4:]


def other_kind() -> bytes:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "damaged"),
        (b"not a key", "damaged"),
        (b"\xff" * 100, "damaged"),
        (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "damaged"),
        (other_kind(), "another kind of key"),
        (b"x" * 10_000_000, "damaged"),
    ],
    ids=["empty", "text", "bytes", "no key in it", "rsa", "huge"],
)
def test_a_damaged_key_is_refused_and_stays(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / KEY_NAME
    path.write_bytes(content)
    path.chmod(0o600)
    for use in (Signer(tmp_path).info, lambda: Signer(tmp_path).sign(b""), Signer(tmp_path).rotate):
        with pytest.raises(SigningKeyError, match=word) as caught:
            use()
        assert KEY_NAME in caught.value.message
        assert "restore it from a backup" in str(caught.value.hint)
    assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == [KEY_NAME]


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_an_open_key_is_refused(tmp_path: Path, mode: int) -> None:
    Signer(tmp_path).info()
    (tmp_path / KEY_NAME).chmod(mode)
    with pytest.raises(SigningKeyError, match=f"mode {mode:04o}") as caught:
        Signer(tmp_path).info()
    assert caught.value.hint == f"chmod 600 {tmp_path / KEY_NAME}"


def test_a_damaged_history_is_refused(tmp_path: Path) -> None:
    Signer(tmp_path).rotate()
    (tmp_path / ROTATIONS_NAME).write_bytes(b"[{}]")
    with pytest.raises(SigningKeyError, match="list of key rotations"):
        Signer(tmp_path).info()


def test_a_key_that_vanished_is_not_replaced(tmp_path: Path) -> None:
    signer = Signer(tmp_path)
    signer.info()
    (tmp_path / KEY_NAME).unlink()
    with pytest.raises(SigningKeyError, match="is gone"):
        signer.sign(b"")
    rotated = tmp_path / "rotated"
    rotated.mkdir()
    Signer(rotated).rotate()
    (rotated / KEY_NAME).unlink()
    with pytest.raises(SigningKeyError, match="is gone"):
        Signer(rotated).info()
    assert not (rotated / KEY_NAME).exists()


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(SigningKeyError, match="No such file"):
        Signer(tmp_path / "absent").info()


def test_importing_the_app_loads_no_cryptography() -> None:
    code = "import sys, spark_service.app\nprint('cryptography' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "False"
