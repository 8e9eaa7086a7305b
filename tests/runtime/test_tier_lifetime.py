"""A tier's life: loaded again and again, closed too early, short of memory, interrupted, killed."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from small_architectures import ModelSize
from small_models import write_small_model
from tier_runs import SIZE, load

from spark_runtime.errors import TierError
from spark_runtime.model_shape import read_model_shape
from spark_runtime.native.build import library_path
from spark_runtime.native_tier import proxy_devices
from spark_runtime.tier_start import slots_start, uniform_start

HELPERS = Path(__file__).resolve().parents[2] / "infra/benchmarks"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model") / "model.gguf", "qwen3moe", SIZE)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_loading_again_and_again_takes_no_more_memory(model: Path) -> None:
    def once() -> None:
        with load(model) as engine:
            engine.prompt([1, 2, 3])
            engine.feed([4], "decode")
            engine.tier.replace(slots_start(engine.shape, [16, 8, 20]))
            engine.tier.counters()

    for _ in range(5):
        once()
    gc.collect()
    before, files = resident_bytes(), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(25):
        once()
    gc.collect()
    # One model has 14 MB of experts.
    assert resident_bytes() - before < 5_000_000
    assert len(list(Path("/proc/self/fd").iterdir())) == files


def test_refused_loads_leave_nothing(model: Path) -> None:
    start = uniform_start(read_model_shape(model), 0.4)
    bad = replace(start, layers=(*start.layers[:-1], replace(start.layers[-1], slots=1)))

    def once() -> None:
        with pytest.raises(TierError):
            load(model, tier=bad)

    for _ in range(5):
        once()
    before, files = resident_bytes(), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(25):
        once()
    assert resident_bytes() - before < 5_000_000
    assert len(list(Path("/proc/self/fd").iterdir())) == files


HEAD = """
import sys
sys.path.append({helpers!r})
from pathlib import Path
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.errors import SparkRuntimeError
from spark_runtime.model_shape import read_model_shape
from spark_runtime.sampling import Sampling
from spark_runtime.session_counts import SessionCounts
from spark_runtime.tier_start import slots_start, uniform_start
shape = read_model_shape(Path({model!r}))
options = EngineOptions(n_ctx=256, n_batch=32, n_threads=1, tier=uniform_start(shape, 0.4))
engine = Engine.load(Path({model!r}), options)
engine.prompt([1, 2, 3])
"""


def program(code: str, model: Path) -> list[str]:
    """A process with ``engine`` loaded and three tokens in it, which then runs the code."""
    return [sys.executable, "-c", HEAD.format(helpers=str(HELPERS), model=str(model)) + code]


def in_process(code: str, model: Path, *, timeout: float = 600) -> str:
    """Run code that may crash; how it ends and what it prints."""
    try:
        answer = subprocess.run(program(code, model), capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return "it hangs"
    return f"exit code {answer.returncode}: {answer.stdout}{answer.stderr[-500:]}"


USES = {
    "logits": "engine.logits()",
    "feed": "engine.feed([1], 'decode')",
    "prompt": "engine.prompt([1, 2])",
    "reset": "engine.reset()",
    "generate": "list(engine.generate(Sampling(temperature=1.0, seed=1), 4))",
    "tokenize": "engine.tokenize('a')",
    "piece": "engine.piece(1)",
    "is_end": "engine.is_end(1)",
    "counters": "engine.tier.counters()",
    "resident": "engine.tier.resident()",
    "replace": "engine.tier.replace(uniform_start(shape, 0.4))",
    "memory": "engine.tier.memory()",
    "check": "engine.tier.check()",
}


@pytest.mark.parametrize("use", USES)
def test_a_closed_engine_says_so(use: str, model: Path) -> None:
    code = f"""
engine.close()
engine.close()
try:
    {USES[use]}
except SparkRuntimeError as error:
    print(type(error).__name__, "closed" in str(error))
"""
    found = in_process(code, model)
    assert found.startswith("exit code 0: "), found
    assert found.endswith("True\n"), found


def test_a_generator_outlives_its_engine(model: Path) -> None:
    code = """
steps = engine.generate(Sampling(temperature=1.0, seed=1), 10)
next(steps)
engine.close()
try:
    next(steps)
except SparkRuntimeError as error:
    print("closed" in str(error))
steps.close()
"""
    assert in_process(code, model) == "exit code 0: True\n"


def test_a_generator_is_closed_in_the_middle(model: Path) -> None:
    code = """
steps = engine.generate(Sampling(temperature=1.0, seed=1), 10)
next(steps)
next(steps)
steps.close()
print(engine.n_past, len(engine.logits()))
steps = engine.generate(Sampling(temperature=1.0, seed=1), 10)
next(steps)
del steps, engine
"""
    assert in_process(code, model) == f"exit code 0: 4 {SIZE.vocabulary}\n"


def test_an_engine_closed_while_it_counts(model: Path) -> None:
    """What was counted up to then is the session's; leaving the block asks a tier that is gone for nothing."""
    code = """
session = SessionCounts(shape)
with engine.counting(session):
    engine.feed([1, 2], "decode")
    engine.close()
print(session.tokens["decode"])
"""
    assert in_process(code, model) == "exit code 0: 2\n"


def test_an_engine_is_dropped_without_being_closed(model: Path) -> None:
    assert in_process("print('done')", model) == "exit code 0: done\n"


def test_threads_that_start_at_once_share_the_devices(model: Path) -> None:
    """The first use of the proxies, in several threads."""
    code = """
import sys, threading
sys.setswitchinterval(1e-6)
from spark_runtime.native_tier import proxy_devices
gate, found = threading.Barrier(4), []
def work():
    gate.wait()
    found.append(tuple(proxy_devices(2)))
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
from spark_runtime.native_tier import tier_library
print(len(found), len(set(found)), tier_library().spark_devices(2))
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert answer.stdout.split()[:2] == ["4", "1"], answer
    assert int(answer.stdout.split()[2]) == len(proxy_devices(2))


def test_no_memory_for_slots_is_an_error_and_the_tier_can_be_placed_again(tmp_path: Path) -> None:
    """With the address space limited to a little more than what the floor takes."""
    size = ModelSize(embedding=256, width=512, latent=64, vocabulary=64)
    path = write_small_model(tmp_path / "large.gguf", "qwen3moe", size)
    code = """
import resource
from spark_runtime.errors import TierError
engine.feed([1, 2], "decode")
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 10_000_000, -1))
try:
    engine.tier.replace(slots_start(shape, [32, 32, 32]))
except TierError as error:
    print("no memory" in str(error))
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
try:
    engine.tier.counters()
except TierError as error:
    print("counters:", error)
engine.tier.replace(slots_start(shape, [8, 8, 8]))
engine.reset()
engine.prompt([1, 2, 3, 4])
print(sum(len(layer) for layer in engine.tier.resident()))
"""
    found = in_process(code, path)
    assert found.startswith("exit code 0: True\n"), found
    assert found.endswith("24\n"), found


# ---- interrupted and killed

DECODING = """
print("ready", flush=True)
while True:
    engine.reset()
    engine.prompt([1, 2, 3])
    engine.feed([4] * 200, "decode", batch=1)
"""


def test_an_interrupt_ends_a_decode_loop_with_a_traceback(model: Path) -> None:
    running = subprocess.Popen(program(DECODING, model), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=120)
    assert running.returncode in {1, 130, -signal.SIGINT}
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_an_interrupted_engine_goes_on(model: Path) -> None:
    """What was computed up to the interrupt and what comes after it are one conversation."""
    code = """
import os, signal, threading
for _ in range(5):
    try:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            engine.reset()
            engine.prompt([1, 2, 3])
            engine.feed([4] * 200, "decode", batch=1)
    except KeyboardInterrupt:
        pass
    rest = engine.n_past
    engine.prompt([1, 2, 3, 4])
    engine.feed([5], "decode")
    first = engine.logits().tobytes()
    engine.reset()
    engine.prompt([1, 2, 3, 4])
    engine.feed([5], "decode")
    print(engine.n_past, len(engine.tier.resident()))
"""
    assert in_process(code, model) == "exit code 0: " + "5 3\n" * 5


@pytest.mark.parametrize("after", [0.05, 0.5, 0.9, 1.1, 1.3, "decoding"])
def test_a_killed_process_leaves_nothing(after: float | str, model: Path, tmp_path: Path) -> None:
    """No file, no shared memory, no lock; whenever it is killed."""
    path, _ = library_path()
    shared = set(Path("/dev/shm").glob("*spark*"))
    before = sorted(entry.name for entry in path.parent.iterdir())
    running = subprocess.Popen(
        program(DECODING, model), stdout=subprocess.PIPE, env=dict(os.environ, TMPDIR=str(tmp_path)), cwd=tmp_path
    )
    assert running.stdout is not None
    if isinstance(after, str):
        assert running.stdout.readline() == b"ready\n"
        time.sleep(0.3)
    else:
        time.sleep(after)
    running.kill()
    running.communicate(timeout=120)
    assert running.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
    assert set(Path("/dev/shm").glob("*spark*")) == shared
    assert sorted(entry.name for entry in path.parent.iterdir()) == before
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with load(model) as engine:
        engine.prompt([1, 2, 3])


def test_a_process_killed_while_it_builds_is_in_nobodys_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its unfinished files lie in the way of no later build, and do not stay."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = "from spark_runtime.native.build import library_path; library_path()"
    running = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    deadline = time.monotonic() + 30
    while not list(tmp_path.rglob("*/tmp*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    path, _ = library_path()
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["libspark-native.sha256", path.name, "lock"]
