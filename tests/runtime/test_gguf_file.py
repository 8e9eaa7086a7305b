"""Files that are not what they claim to be."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.errors import ModelFileError, NotGgufError, SparkRuntimeError, TruncatedModelError
from spark_runtime.gguf_file import read_gguf
from spark_runtime.model_shape import read_model_shape


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such model file"):
        read_gguf(tmp_path / "none.gguf")


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot read"):
        read_gguf(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_regular_file_is_refused_unopened(tmp_path: Path, kind: str) -> None:
    path = Path(os.devnull)
    if kind == "pipe":
        path = tmp_path / "model.gguf"
        os.mkfifo(path)
    with pytest.raises(NotGgufError, match="pipe, socket or device") as caught:
        read_gguf(path)
    assert caught.value.hint


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip", b"\x00" * 64])
def test_not_a_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(NotGgufError, match=re.escape("expected b'GGUF'")) as caught:
        read_gguf(path)
    assert caught.value.hint


@pytest.mark.parametrize("kept", [5, 24, 2_000, 250_000, 5_000_000, -1])
def test_truncated_anywhere(demo_model: Path, tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(demo_model.read_bytes()[:kept])
    with pytest.raises(TruncatedModelError, match=r"truncated|damaged or incomplete") as caught:
        read_gguf(path)
    assert "again" in str(caught.value.hint)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(4, 300_000), value=st.binary(min_size=1, max_size=12))
def test_damaged_headers_never_do_more_than_raise(patched, position: int, value: bytes) -> None:
    def damage(data: bytearray) -> None:
        data[position : position + len(value)] = value

    # Many positions hold text or weights, where another value is just another model.
    with contextlib.suppress(SparkRuntimeError):
        read_model_shape(patched(damage))


def test_absurd_sizes_are_refused_without_allocating(patched) -> None:
    def claim(data: bytearray) -> None:
        data[8:16] = (2**60).to_bytes(8, "little")

    with pytest.raises(TruncatedModelError):
        read_gguf(patched(claim))


class TestSplitModels:
    """``NAME-00001-of-0000N.gguf``, as ``llama-gguf-split`` writes them."""

    def split(self, source: Path, folder: Path, count: int = 2) -> list[Path]:
        model = gguf.GGUFReader(source)
        paths = []
        for index in range(count):
            path = folder / f"model-{index + 1:05d}-of-{count:05d}.gguf"
            writer = gguf.GGUFWriter(path, "qwen3moe")
            writer.add_uint16("split.no", index)
            writer.add_uint16("split.count", count)
            writer.add_int32("split.tensors.count", len(model.tensors))
            if index == 0:
                for name, entry in model.fields.items():
                    if not name.startswith(("GGUF.", "general.architecture")):
                        kind = entry.types[0]
                        if kind != gguf.GGUFValueType.ARRAY:
                            writer.add_key_value(name, entry.contents(), kind)
            for tensor in model.tensors[index::count]:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            paths.append(path)
        return paths

    def test_shape_is_that_of_the_whole(self, models, spec, tmp_path: Path) -> None:
        whole = models.write(spec(quantised=True))
        shards = self.split(whole, tmp_path)
        shape, expected = read_model_shape(shards[0]), read_model_shape(whole)
        assert shape == expected
        assert read_model_shape(shards[1]) == expected
        assert read_gguf(shards[1]).path == shards[0]

    def test_any_shard_runs_the_whole(self, models, spec, tmp_path: Path) -> None:
        whole = models.write(spec())
        folder = tmp_path / "with späce"
        folder.mkdir()
        logits = []
        for path in (whole, *self.split(whole, folder)):
            with Engine.load(path, EngineOptions(n_ctx=64, n_threads=1)) as engine:
                engine.prompt([1, 2, 3])
                logits.append(engine.logits().tobytes())
        assert logits[0] == logits[1] == logits[2]

    def test_missing_shard(self, models, spec, tmp_path: Path) -> None:
        shards = self.split(models.write(spec()), tmp_path, 3)
        shards[1].unlink()
        with pytest.raises(TruncatedModelError, match=r"1 of 3 files .* missing: model-00002-of-00003"):
            read_gguf(shards[0])

    def test_shard_of_another_position(self, models, spec, tmp_path: Path) -> None:
        shards = self.split(models.write(spec()), tmp_path)
        shutil.copy(shards[0], shards[1])
        with pytest.raises(ModelFileError, match=r"split.no is 0, expected 1"):
            read_gguf(shards[0])

    def test_renamed_shard(self, models, spec, tmp_path: Path) -> None:
        first = self.split(models.write(spec()), tmp_path)[0]
        renamed = first.rename(tmp_path / "renamed.gguf")
        with pytest.raises(ModelFileError, match="a split model of 2 files"):
            read_gguf(renamed)
