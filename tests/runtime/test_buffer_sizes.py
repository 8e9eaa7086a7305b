"""What a dry load predicts is what a real load allocates: real llama.cpp throughout."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spark_runtime import buffer_sizes as module
from spark_runtime.buffer_sizes import HOST, BufferSizes, buffer_sizes, log_lines, needs_of, read_buffer_sizes
from spark_runtime.errors import UnsupportedModelError
from spark_runtime.gguf_file import read_gguf
from spark_runtime.host_memory import HostMemory
from spark_runtime.llama import bindings
from spark_runtime.memory_plan import DeviceMemory
from spark_runtime.memory_planner import plan_memory
from spark_runtime.model_shape import read_model_shape

LOG_STEP = 2**20 // 100 + 1


def real_load(path: Path, n_ctx: int, n_batch: int, n_ubatch: int) -> BufferSizes:
    """What llama.cpp logs while it loads without mapping the file, so that buffers hold weights and nothing else."""
    llama = bindings()
    params = llama.llama_model_default_params()
    params.load_mode = 0
    context_params = llama.llama_context_default_params()
    context_params.n_ctx, context_params.n_batch, context_params.n_ubatch = n_ctx, n_batch, n_ubatch
    context_params.n_seq_max = 1
    with log_lines() as lines:
        model = llama.llama_model_load_from_file(os.fsencode(path), params)
        context = llama.llama_init_from_model(model, context_params)
    llama.llama_free(context)
    llama.llama_model_free(model)
    return read_buffer_sizes(lines)


def assert_predicted(path: Path, n_ctx: int, n_batch: int, n_ubatch: int) -> BufferSizes:
    predicted = buffer_sizes(read_gguf(path), n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_ubatch)
    real = real_load(path, n_ctx, n_batch, n_ubatch)
    weights = sum(predicted.model.values()) + sum(predicted.experts.values())
    # Each buffer is logged with two digits and read as the most that it can be.
    assert 0 <= sum(real.model.values()) - weights <= LOG_STEP * len(real.model)
    assert predicted.context == real.context
    assert predicted.compute == real.compute
    assert predicted.output == real.output
    assert predicted.blocks == real.blocks
    return predicted


@pytest.mark.parametrize(("n_ctx", "n_batch", "n_ubatch"), [(4096, 512, 512), (2048, 256, 64), (300, 32, 32)])
def test_the_demo_model_allocates_what_was_predicted(demo_model: Path, n_ctx: int, n_batch: int, n_ubatch: int) -> None:
    sizes = assert_predicted(demo_model, n_ctx, n_batch, n_ubatch)
    shape = read_model_shape(demo_model)
    assert sizes.experts == {HOST: shape.expert_bytes_total}
    assert 0 <= sum(sizes.model.values()) - shape.core_bytes < 4096
    assert 0 <= sizes.context[HOST] - shape.context_bytes(-(-n_ctx // 256) * 256) <= LOG_STEP


@pytest.mark.parametrize(
    "changes",
    [{}, {"quantised": True}, {"blocks": 5, "experts": 40}],
    ids=lambda changes: ",".join(changes) or "plain",
)
def test_other_models_allocate_what_was_predicted(models: Any, spec: Any, changes: dict[str, Any]) -> None:
    assert_predicted(models.write(spec(**changes)), 128, 32, 32)


def test_a_dry_load_reads_no_weights(models: Any, spec: Any) -> None:
    path = models.write(spec(blocks=8, experts=256))
    buffer_sizes(read_gguf(path), n_ctx=128, n_batch=32, n_ubatch=32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sizes = buffer_sizes(read_gguf(path), n_ctx=128, n_batch=32, n_ubatch=32)
    assert sum(sizes.experts.values()) > 40 * 2**20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024  # KiB


def test_a_damaged_model_is_refused_with_its_reason(
    demo_model: Path, patched: Callable[[Callable[[bytearray], None]], Path]
) -> None:
    def rename(data: bytearray) -> None:
        start = data.index(b"blk.0.attn_norm.weight")
        data[start : start + 4] = b"blk."[::-1]

    path = patched(rename)
    with pytest.raises(UnsupportedModelError, match=r"tensor 'blk\.0\.attn_norm\.weight' not found"):
        buffer_sizes(read_gguf(path), n_ctx=128, n_batch=32, n_ubatch=32)


class ExactBuffers:
    """Stands for a device's buffers."""

    def __init__(self, name: str) -> None:
        self.name = name

    def size_of(self, tensor: Any) -> int:
        return int(tensor.n_bytes)


def test_layers_of_two_devices_are_told_apart(demo_model: Path) -> None:
    model, shape = read_gguf(demo_model), read_model_shape(demo_model)
    lines = [
        "load_tensors: layer   0 assigned to device SPARK0, is_swa = 0",
        "load_tensors: layer   1 assigned to device SPARK0, is_swa = 0",
        "load_tensors: layer   2 assigned to device SPARK0, is_swa = 0",
        "load_tensors: layer   3 assigned to device SPARK1, is_swa = 0",
        "load_tensors: layer   4 assigned to device SPARK1, is_swa = 0",
        "model has unused tensor blk.3.attn_norm.weight (size = 1024 bytes) -- ignoring",
        *(f"create_tensor: loading tensor {name}" for name in (*model.tensors, "absent.weight")),
        # As the output: in the memory of the last device, beside the rows that are looked up on the host.
        "create_tensor: loading tensor token_embd.weight",
        "load_tensors:       SPARK0 model buffer size =     0.00 MiB",
        "llama_context:  CUDA_Host  output buffer size =     0.03 MiB",
        *(f"llama_kv_cache: layer   {layer}: dev = SPARK{layer // 3}" for layer in range(4)),
        "llama_kv_cache:     SPARK0 KV buffer size =     0.00 MiB",
        "llama_kv_cache: size =    8.00 MiB (  4096 cells,   4 layers,  1/1 seqs), K (f16): 4.00 MiB",
        "llama_memory_recurrent:     SPARK1 RS buffer size =     1.00 MiB",
        "sched_reserve:     SPARK0 compute buffer size =    17.00 MiB",
        "sched_reserve:        CPU compute buffer size =     2.00 MiB",
    ]
    types: Any = {name: ExactBuffers(f"{name}_buffers") for name in ("CPU", "SPARK0", "SPARK1")}
    lines = [line.replace("SPARK0 compute", "SPARK0_buffers compute") for line in lines]
    lines = [line.replace("SPARK1 RS", "SPARK1_buffers RS") for line in lines]
    sizes = module._dry_sizes(model, lines, types)

    def of(*prefixes: str) -> int:
        return sum(t.n_bytes for name, t in model.tensors.items() if name.startswith(prefixes) and "_exps" not in name)

    assert sizes.model["CPU_buffers"] == model.tensors["token_embd.weight"].n_bytes
    assert sizes.model["SPARK0_buffers"] == of("blk.0.", "blk.1.", "blk.2.")
    unused = model.tensors["blk.3.attn_norm.weight"].n_bytes
    assert sizes.model["SPARK1_buffers"] == of("blk.3.", "output", "token_embd") - unused
    eight = 8 * 2**20
    assert eight * 3 // 4 < sizes.context["SPARK0_buffers"] < eight * 3 // 4 + LOG_STEP
    assert eight // 4 + 2**20 < sizes.context["SPARK1_buffers"] < eight // 4 + 2**20 + 2 * LOG_STEP
    assert sum(sizes.experts.values()) == shape.expert_bytes_total
    needs = needs_of(shape, sizes, ["SPARK0_buffers", "SPARK1_buffers"])
    assert [device.layers for device in needs.devices] == [(0, 1, 2), (3,)]
    assert needs.host_core_bytes == sizes.model["CPU_buffers"]
    assert needs.host_compute_bytes == sizes.compute["CPU"] + sizes.output["CUDA_Host"]
    assert sizes.total() == sizes.total(experts=False) + shape.expert_bytes_total
    with pytest.raises(ValueError, match="block 3 is on SPARK1_buffers"):
        needs_of(shape, sizes, ["SPARK0_buffers"])


def test_a_plan_is_made_from_a_dry_load(demo_model: Path) -> None:
    model, shape = read_gguf(demo_model), read_model_shape(demo_model)
    host = HostMemory(2**30, "made up", 2**30, "made up")

    def measure(n_ctx: int, n_ubatch: int) -> Any:
        return needs_of(shape, buffer_sizes(model, n_ctx=n_ctx, n_batch=n_ubatch, n_ubatch=n_ubatch), [HOST])

    device = DeviceMemory.over_host(HOST, host, 12 * 2**20)
    plan = plan_memory(shape, measure, n_ctx=512, n_ubatch=64, devices=[device], host=host)
    assert not plan.fits_entirely
    assert plan.devices[0].total <= 12 * 2**20
    assert 0 < plan.devices[0].experts < shape.expert_bytes_total
