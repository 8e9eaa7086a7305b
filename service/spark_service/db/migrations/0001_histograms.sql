-- One model per fingerprint, as its first upload described it.
CREATE TABLE models (
    fingerprint VARCHAR PRIMARY KEY,
    sibling VARCHAR NOT NULL,
    shape_json VARCHAR NOT NULL
);

-- What was uploaded: a session, or a part of one. The content id makes the same counts one row for good.
CREATE TABLE parts (
    content_id VARCHAR PRIMARY KEY,
    fingerprint VARCHAR NOT NULL,
    workload VARCHAR NOT NULL,
    session_hash VARCHAR NOT NULL,
    split VARCHAR NOT NULL CHECK (split IN ('calibration', 'held_out')),
    -- Retention and time windows need it, and nothing could add it later. Nothing finer is kept.
    received_day DATE NOT NULL DEFAULT current_date
);

-- Counts of a part in one phase: blocks one after the other, block b taking n_experts[b] entries of counts
-- and n_experts[b] + 1 of reuse. UBIGINT, because counts up to 2^53 are legal; small ones are packed on disk anyway.
CREATE TABLE histograms (
    content_id VARCHAR NOT NULL,
    phase VARCHAR NOT NULL CHECK (phase IN ('prefill', 'decode')),
    tokens UBIGINT NOT NULL,
    blocks UINTEGER[] NOT NULL,
    n_experts UINTEGER[] NOT NULL,
    layer_tokens UBIGINT[] NOT NULL,
    counts UBIGINT[] NOT NULL,
    reuse UBIGINT[],
    PRIMARY KEY (content_id, phase)
);

-- Receipts by idempotency key.
CREATE TABLE uploads (
    idempotency_key VARCHAR PRIMARY KEY,
    body_sha256 VARCHAR NOT NULL,
    accepted UINTEGER NOT NULL,
    duplicates UINTEGER NOT NULL
);

-- Sessions that were deleted: an agent that retries must not bring them back.
CREATE TABLE deleted_sessions (
    session_hash VARCHAR PRIMARY KEY
);
