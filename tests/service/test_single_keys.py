from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_schemas.histogram import HistogramUpload
from spark_service.errors import RequestError
from spark_service.single_keys import require_single_keys

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@given(agent=TEXTS, architecture=TEXTS, name=st.none() | TEXTS, types=st.dictionaries(TEXTS, TEXTS, max_size=3))
def test_no_upload_without_a_double_key_is_refused(
    make: Any, agent: str, architecture: str, name: str | None, types: dict[str, str]
) -> None:
    """Colons in texts do not count, however they are written."""
    shape = make.shape([(4, 2, 10)])
    fields = json.loads(make.body(shape, make.sessions(shape, 1, 1, decode=5, prefill=3)))
    fields["agent_version"], fields["model"]["architecture"], fields["model"]["name"] = agent, architecture, name
    fields["model"]["layers"][0]["tensor_types"] = types
    for ascii_only in (True, False):
        raw = json.dumps(fields, ensure_ascii=ascii_only, indent=1).encode()
        require_single_keys(raw, HistogramUpload.model_validate_json(raw))


def test_every_key_twice_is_found(make: Any) -> None:
    """Each object of an upload in turn gets its first key a second time, with the same value or another."""
    shape = make.shape([(4, 2, 10)])
    raw = make.body(shape, make.sessions(shape, 1, 1, decode=5, prefill=3)).replace(b'"Toy MoE"', b'"a:b"')
    found = 0
    for place, character in enumerate(raw):
        if character != ord("{"):
            continue
        key, value = json.loads("{" + raw[place + 1 :].decode().split(":", 1)[0] + ":0}").popitem()[0], 0
        _, end = json.JSONDecoder().raw_decode(raw.decode(), place + len(key) + 4)
        value = raw[place + len(key) + 4 : end]
        doubled = raw[: place + 1] + b'"%s":%s,' % (key.encode(), value) + raw[place + 1 :]
        with pytest.raises(RequestError) as caught:
            require_single_keys(doubled, HistogramUpload.model_validate_json(doubled))
        assert (caught.value.status, caught.value.code, caught.value.found) == (400, "duplicate_key", key)
        found += 1
    # The upload, its model, a layer and its types, two sessions of two phases with a layer each, and reuse.
    assert found == 4 + 2 * (1 + 2 * 2 + 1)
