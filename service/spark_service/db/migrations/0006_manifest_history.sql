-- Every distinct manifest that was served, as the bytes that were signed.
CREATE TABLE manifests (
    fingerprint VARCHAR NOT NULL,
    workload VARCHAR NOT NULL,
    phase VARCHAR NOT NULL CHECK (phase IN ('prefill', 'decode')),
    vram_bytes UBIGINT NOT NULL,
    n_ctx UBIGINT NOT NULL,
    reserve_bytes UBIGINT NOT NULL,
    revision VARCHAR NOT NULL,
    sha256 VARCHAR NOT NULL,
    body_bytes UBIGINT NOT NULL,
    body_zstd BLOB NOT NULL,
    first_served_day DATE NOT NULL DEFAULT current_date,
    -- Order of first service: days are too coarse, and nothing finer is kept.
    sequence UBIGINT NOT NULL,
    PRIMARY KEY (fingerprint, workload, phase, vram_bytes, n_ctx, reserve_bytes, sha256)
);

-- The revision that is served in place of the newest, until it is unpinned.
CREATE TABLE manifest_pins (
    fingerprint VARCHAR NOT NULL,
    workload VARCHAR NOT NULL,
    phase VARCHAR NOT NULL CHECK (phase IN ('prefill', 'decode')),
    revision VARCHAR NOT NULL,
    pinned_day DATE NOT NULL DEFAULT current_date,
    PRIMARY KEY (fingerprint, workload, phase)
);
