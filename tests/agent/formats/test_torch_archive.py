"""Tensors are read, and nothing that is in a file ever runs."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from torch_file import TorchFile, save

from spark_agent.formats.reading import FormatError
from spark_agent.formats.torch_archive import read_torch_archive
from spark_agent.formats.torch_writer import torch_archive_bytes

COUNTS = np.arange(24, dtype="<i4").reshape(2, 3, 4)


def refused(path: Path, data: bytes, reason: str) -> None:
    path.write_bytes(data)
    with pytest.raises(FormatError, match=reason) as caught:
        read_torch_archive(path)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("dtype", ["<i4", "<i8", "<f4", "<f8", "|u1"])
def test_values_and_tensors(tmp_path: Path, dtype: str) -> None:
    value = {"rank": 0, "counts": COUNTS.astype(dtype), "rate": 0.5, "none": None, "list": [1, ("a", 2)]}
    found = read_torch_archive(save(tmp_path / "a.pt", value))
    assert found.pop("counts").tolist() == COUNTS.tolist()
    assert found == {"rank": 0, "rate": 0.5, "none": None, "list": [1, ("a", 2)]}


CODE = {
    "system": b"cos\nsystem\n(X\x05\x00\x00\x00falsetR",
    "eval": b"cbuiltins\neval\n(X\x01\x00\x00\x001tR",
    "torch.load": b"ctorch\nload\n(X\x01\x00\x00\x00atR",
    "torch.storage": b"ctorch.storage\n_load_from_bytes\n(X\x01\x00\x00\x00atR",
    "numpy": b"cnumpy.core.multiarray\n_reconstruct\n(NtR",
    "named by the stack": b"X\x02\x00\x00\x00osX\x06\x00\x00\x00system\x93",
    "instance": b"(X\x01\x00\x00\x00aios\nsystem\n",
    "object": b"(cbuiltins\neval\nX\x01\x00\x00\x001o",
    "build": b"}}b",
    "newobj": b"ccollections\nOrderedDict\n)\x81",
    "extension": b"\x82\x01",
    "persistent text": b"Pa\n",
    "a class with a line break": b"ccollections OrderedDict\nx\n",
}


@pytest.mark.parametrize("code", CODE.values(), ids=CODE)
def test_code_is_refused_before_it_runs(tmp_path: Path, code: bytes) -> None:
    refused(tmp_path / "a.pt", TorchFile().archive(code), "its pickle|damaged pickle")


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return (pytest.fail, ("it was unpickled",))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_call_is_refused(tmp_path: Path, protocol: int) -> None:
    archive = tmp_path / "a.pt"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps({"logical_count": Bomb()}, protocol))
    refused(archive, archive.read_bytes(), "its pickle")
    # The format before archives: a pickle and nothing around it.
    refused(archive, pickle.dumps(Bomb(), protocol), "not a file of torch.save")


def test_what_is_written_is_read_as_it_was(tmp_path: Path) -> None:
    tables = {
        "mask": COUNTS[0] % 3 == 0,
        "counts": COUNTS.astype("<i8")[None],
        "fortran": np.asfortranarray(COUNTS[0]),
        "share": COUNTS.astype("<f4") / 7,
        "none": np.zeros((0, 3), dtype="<i8"),
    }
    path = tmp_path / "a.pt"
    path.write_bytes(torch_archive_bytes(tables, {"model": "Qwen ü"}))
    found = read_torch_archive(path)
    assert found.pop("model") == "Qwen ü"
    assert {name: (table.dtype, table.tolist()) for name, table in found.items()} == {
        name: (table.dtype, table.tolist()) for name, table in tables.items()
    }
    assert torch_archive_bytes(tables, {"model": "Qwen ü"}) == path.read_bytes()
    with pytest.raises(KeyError):
        torch_archive_bytes({"complex": np.ones(2, dtype=complex)}, {})


def test_a_stride_along_an_axis_of_one_is_never_taken(tmp_path: Path) -> None:
    file = TorchFile()
    path = tmp_path / "a.pt"
    path.write_bytes(file.archive(file.tensor(COUNTS[:1], stride=(0, 4, 1))))
    assert read_torch_archive(path).tolist() == COUNTS[:1].tolist()


def test_storages_that_lie(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    for lie, reason in (
        ({"claimed": 25}, "storage 0 has 96 bytes for 25 numbers"),
        ({"claimed": 2**30}, "storage 0 has 96 bytes"),
        ({"offset": 1}, "in a storage of 24 numbers"),
        ({"offset": -1}, "a tensor of size"),
        ({"stride": (12, 4, 0)}, "in a storage of 24 numbers"),
        ({"stride": (1, 2, 6)}, "in a storage of 24 numbers"),
    ):
        file = TorchFile()
        refused(path, file.archive(file.tensor(COUNTS, **lie)), reason)
    file = TorchFile()
    pickled = file.tensor(COUNTS)
    file.storages.clear()
    refused(path, file.archive(pickled), "storage 0 is missing")
    file = TorchFile()
    pickled = file.tensor(COUNTS).replace(struct.pack("<i", 4), struct.pack("<i", 2**31 - 1), 1)
    refused(path, file.archive(pickled), "a tensor of size|in a storage of")


def test_bombs(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    file = TorchFile()
    zeros = file.tensor(np.zeros((1000, 1000), dtype="<i4"))
    refused(path, file.archive(zeros, zipfile.ZIP_DEFLATED), "is compressed")
    # A header that claims more than there is.
    data = bytearray(file.archive(zeros))
    size = struct.pack("<I", 4_000_000)
    data = data.replace(size, struct.pack("<I", 4_000_000_000))
    refused(path, bytes(data), "bytes|not a file of torch.save")
    # An instruction for an integer of 2 GB, and a memo that points nowhere.
    refused(path, TorchFile().archive(b"\x8b\xff\xff\xff\x7f"), "damaged pickle|its pickle")
    refused(path, TorchFile().archive(b"j\xff\xff\xff\x7f"), "damaged pickle")
    refused(path, TorchFile().archive(b"ttt"), "damaged pickle")
    # A place in the memo for which the unpickler would take 32 GB.
    refused(path, TorchFile().archive(b"}r\xff\xff\xff\x7f"), "remembers a value as number 2147483647")


def test_damaged_files(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", {"counts": COUNTS})
    data = path.read_bytes()
    for length in range(0, len(data), 13):
        path.write_bytes(data[:length])
        with pytest.raises(FormatError):
            read_torch_archive(path)
    for index in range(0, len(data), 3):
        changed = bytearray(data)
        changed[index] ^= 0xFF
        path.write_bytes(changed)
        try:
            read_torch_archive(path)
        except FormatError:
            continue
    with pytest.raises(FormatError, match="cannot read"):
        read_torch_archive(tmp_path)
