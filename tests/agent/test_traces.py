from __future__ import annotations

import json
import sqlite3
import stat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_agent.errors import RefusedError, SparkError
from spark_agent.spool import Spool
from spark_agent.trace_files import SessionTrace
from spark_agent.traces import TraceFolder, load_traces
from spark_agent.upload import preview
from spark_runtime.session_counts import TokenTrace
from spark_schemas.model import ExpertLayer, ModelShape


def shape_of(*top_ks: int, name: str = "a") -> ModelShape:
    layers = tuple(
        ExpertLayer(block=block + 1, n_experts=1000, top_k=top_k, expert_bytes=7, tensor_types={"up": "q4_K"})
        for block, top_k in enumerate(top_ks)
    )
    return ModelShape(
        fingerprint="mf1-" + name * 32,
        sibling="ms1-" + name * 32,
        architecture="test",
        n_blocks=len(top_ks) + 1,
        context_length=10,
        core_bytes=0,
        kv_bytes_per_token=0,
        layers=layers,
    )


SHAPE = shape_of(2, 4)
N_TOKENS = 312


def session(seed: int, tokens: int, workload: str = "chat") -> SessionTrace:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, 1000, (tokens, layer.top_k)) for layer in SHAPE.layers]
    decode = rng.random(tokens) < 0.5
    ids[1][~decode] = -1
    return SessionTrace(f"{seed:064x}", workload, ids, decode)


@pytest.fixture
def sessions() -> list[SessionTrace]:
    return [session(1, 5), session(2, 300, "code"), session(3, 7)]


@pytest.fixture
def folder(tmp_path: Path, sessions) -> Path:
    path = tmp_path / "new" / "traces"
    save(path, sessions)
    return path


def save(path: Path, sessions, **options) -> TraceFolder:
    with TraceFolder(path, SHAPE, **options) as found:
        for item in sessions:
            found.add(item)
    return found


def same(found: list[SessionTrace], expected: list[SessionTrace]) -> bool:
    assert [item.session_hash for item in found] == [item.session_hash for item in expected]
    for new, old in zip(found, expected, strict=True):
        assert (new.workload, new.decode.tolist()) == (old.workload, old.decode.tolist())
        assert all(np.array_equal(a, b) for a, b in zip(new.ids, old.ids, strict=True))
    return True


def test_a_round_trip(folder, sessions):
    found = load_traces(folder)
    assert found.shape == SHAPE
    assert same(found.sessions, sessions)
    assert same(load_traces(folder / "trace-000001.parquet").sessions, sessions)


def test_files_are_their_owners_and_add_up(folder, sessions):
    save(folder, [session(4, 3)])
    assert sorted(entry.name for entry in folder.iterdir()) == ["trace-000001.parquet", "trace-000002.parquet"]
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in folder.iterdir()} == {0o600}
    assert same(load_traces(folder).sessions, [*sessions, session(4, 3)])


def test_a_session_recorded_again_is_the_newer_one(folder, sessions):
    longer = session(1, 9)
    save(folder, [longer])
    assert same(load_traces(folder).sessions, [longer, *sessions[1:]])


def test_long_sessions_go_over_several_files(tmp_path):
    long = session(1, 40_000)
    found = save(tmp_path, [session(2, 10), long, session(3, 10)], limit_bytes=2**20)
    assert len(found.written) > 1
    assert found.removed == 0
    assert same(load_traces(tmp_path).sessions, [session(2, 10), long, session(3, 10)])


WIDTHS = {"input": [3, 5], "router": [3, 4]}


def hidden_session(seed: int, tokens: int, first: int = 0, widths=WIDTHS) -> SessionTrace:
    plain = session(seed, first + tokens)
    rng = np.random.default_rng(seed)
    part = slice(first, first + tokens)
    rows = {
        kind: [rng.standard_normal((first + tokens, width)).astype(np.float16)[part] for width in layers]
        for kind, layers in widths.items()
    }
    ids = [layer[part] for layer in plain.ids]
    return SessionTrace(plain.session_hash, plain.workload, ids, plain.decode[part], first, rows)


def test_hidden_states_come_back_in_the_order_of_the_sessions(tmp_path):
    """Over several files, beside older ones without any, and of a session that came in pieces."""
    save(tmp_path, [session(9, 20)])
    limit = 600_000
    pieces = [hidden_session(1, 3000), hidden_session(2, 4000)]
    save(tmp_path, [*pieces, hidden_session(3, 50), hidden_session(3, 70, 50)], limit_bytes=limit, hidden_widths=WIDTHS)
    assert len(list(tmp_path.iterdir())) > 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    found = load_traces(tmp_path)
    assert found.hidden_kinds() == ["input", "router"]
    assert len(found.sessions) == 4
    with pytest.raises(KeyError):
        found.hidden("input", 0)
    kept = found.with_hidden(["input", "router"])
    assert [len(item.decode) for item in kept.sessions] == [3000, 4000, 120]
    whole = [*pieces, hidden_session(3, 120)]
    for kind, layers in WIDTHS.items():
        for layer, width in enumerate(layers):
            expected = [item.hidden[kind][layer] for item in whole[:2]]
            values = kept.hidden(kind, layer)
            assert values.dtype == np.float16
            assert values.shape == (7120, width)
            np.testing.assert_array_equal(values[:7000], np.concatenate(expected))


def test_hidden_states_count_toward_the_limit(tmp_path):
    limit = 200_000
    for seed in range(8):
        found = save(tmp_path, [hidden_session(seed, 2000)], limit_bytes=limit, hidden_widths=WIDTHS)
        assert sum(path.stat().st_size for path in tmp_path.glob("*.parquet")) <= limit
    assert found.removed
    assert load_traces(tmp_path).hidden_kinds() == ["input", "router"]


@pytest.mark.parametrize(
    "changes",
    [
        {"meta_hidden": "{}"},
        {"meta_hidden": "[]"},
        {"meta_hidden": "no json"},
        {"meta_hidden": '{"output": [3, 5], "router": [3, 4]}'},
        {"meta_hidden": '{"input": [3], "router": [3, 4]}'},
        {"meta_hidden": '{"input": [3, 0], "router": [3, 4]}'},
        {"meta_hidden": '{"input": [3, 4], "router": [3, 4]}'},
        {"meta_hidden": '{"input": [3, 5]}'},
        {"meta_trace": "1"},
        {"input_1": None},
    ],
    ids=range(10),
)
def test_altered_hidden_states_are_refused(tmp_path, changes):
    save(tmp_path, [hidden_session(1, N_TOKENS)], hidden_widths=WIDTHS)
    path = tmp_path / "trace-000001.parquet"
    rewrite(path)
    assert load_traces(path).hidden("router", 1).shape == (N_TOKENS, 4)
    rewrite(path, **changes)
    with pytest.raises(SparkError, match="is not a trace"):
        load_traces(path)


def test_hidden_states_that_went_away_meanwhile(tmp_path):
    save(tmp_path, [hidden_session(1, 30)], hidden_widths=WIDTHS)
    found = load_traces(tmp_path)
    (tmp_path / "trace-000001.parquet").unlink()
    with pytest.raises(SparkError, match="is not a trace"):
        found.hidden("input", 0)
    save(tmp_path, [session(1, 30)])
    with pytest.raises(SparkError, match="no longer has input"):
        found.hidden("input", 0)


def test_the_oldest_files_leave_for_new_ones(tmp_path):
    limit = 100_000
    for seed in range(12):
        found = save(tmp_path, [session(seed, 2000)], limit_bytes=limit)
        assert sum(path.stat().st_size for path in tmp_path.glob("*.parquet")) <= limit
    assert found.removed
    numbers = sorted(int(path.stem[-6:]) for path in tmp_path.glob("*.parquet"))
    assert numbers[-1] >= 12
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert load_traces(tmp_path).sessions[-1].session_hash == f"{11:064x}"


def test_what_lost_its_start_is_left_out(tmp_path):
    save(tmp_path, [session(1, 40_000), session(2, 5)], limit_bytes=2**20)
    (tmp_path / "trace-000001.parquet").unlink()
    assert same(load_traces(tmp_path).sessions, [session(2, 5)])


def test_nothing_to_write_or_nowhere(tmp_path, sessions):
    save(tmp_path / "traces", [])
    assert not (tmp_path / "traces").exists()
    (tmp_path / "file").touch()
    with pytest.raises(SparkError, match="cannot write"):
        save(tmp_path / "file", sessions)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name != "xdg"] == ["file"]


def rewrite(path: Path, **changes: object) -> None:
    table = pq.read_table(path)
    metadata = dict(table.schema.metadata)
    for name, value in changes.items():
        if name.startswith("meta_"):
            metadata[f"spark.{name[5:]}".encode()] = str(value).encode()
        elif value is None:
            table = table.drop_columns([name])
        else:
            index = table.schema.get_field_index(name)
            field = pa.field(name, value.type, nullable=table.schema.field(name).nullable)
            table = table.set_column(index, field, value)
    pq.write_table(table.replace_schema_metadata(metadata), path)


@pytest.mark.parametrize(
    "changes",
    [
        {"meta_trace": "2"},
        {"meta_trace": "3"},
        {"meta_trace": ""},
        {"meta_model": "{}"},
        {"meta_model": shape_of(2, 4, 4).model_dump_json()},
        {"block_1": None},
        {"decode": None},
        {"block_1": pa.array([[0, 1, 2]] * N_TOKENS, pa.list_(pa.uint16(), 3))},
        {"block_1": pa.array([[0, 1000]] * N_TOKENS, pa.list_(pa.uint16(), 2))},
        {"block_1": pa.array([[0, -1]] * N_TOKENS, pa.list_(pa.int16(), 2))},
        {"session": pa.array(["nobody"] * N_TOKENS).dictionary_encode()},
        {"token": pa.array([0] * N_TOKENS, pa.uint32())},
    ],
    ids=range(12),
)
def test_altered_files_are_refused(folder, changes):
    path = folder / "trace-000001.parquet"
    rewrite(path)
    assert load_traces(path).sessions
    rewrite(path, **changes)
    with pytest.raises(SparkError, match="is not a trace") as caught:
        load_traces(path)
    assert caught.value.hint


def test_damaged_files_are_refused_or_read(folder):
    path = folder / "trace-000001.parquet"
    data = path.read_bytes()
    refused = 0
    for index in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[index] ^= 0xFF
        path.write_bytes(damaged)
        try:
            found = load_traces(path)
        except SparkError:
            refused += 1
        else:
            assert all(ids.max(initial=-1) < 1000 for item in found.sessions for ids in item.ids)
    assert refused > len(data) // 40
    for length in (0, 1, 30, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(SparkError):
            load_traces(path)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04", b"PAR1", b"PAR1PAR1"])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(SparkError, match="is not a trace"):
        load_traces(path)
    for missing in (tmp_path, tmp_path / "absent"):
        with pytest.raises(SparkError, match="no such trace"):
            load_traces(missing)


def test_another_models_trace_is_refused(folder):
    with TraceFolder(folder, shape_of(2, 4, name="b")) as other:
        other.add(session(9, 3))
    with pytest.raises(SparkError, match="another model"):
        load_traces(folder)


def test_a_trace_never_gets_into_the_spool(tmp_path, sessions):
    for trace in (sessions[0], hidden_session(1, 3), TokenTrace(sessions[0].decode, sessions[0].ids)):
        with Spool.open(tmp_path / "spool.db") as spool, pytest.raises(RefusedError, match="only histograms") as caught:
            spool.add(SHAPE, trace)
        assert caught.value.exit_code == 3


def test_a_trace_smuggled_into_the_spool_is_not_sent(tmp_path, make_model, make_session):
    """The uploader reads every row again as what may leave."""
    path = tmp_path / "spool.db"
    with Spool.open(path) as spool:
        model = make_model()
        spool.add(model, make_session(model))
        assert list(preview(spool, minimum_tokens=1))
        with sqlite3.connect(path) as connection:
            body = json.dumps({"session_hash": "0" * 64, "workload": "chat", "ids": [[[1, 2], [3, 4]]]})
            connection.execute("UPDATE sessions SET body = ?, bytes = ?", (body, len(body)))
        connection.close()
        assert list(preview(spool, minimum_tokens=1)) == []
