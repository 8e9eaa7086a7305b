-- Lists of numbers cost a checkpoint more than anything else: each is analysed by every compression and rewritten
-- with its row group. Counts become bytes instead: blocks one after the other as before, as little-endian unsigned
-- numbers of 1, 2, 4 or 8 bytes, the narrowest that hold the row's largest. What was stored before is moved over at
-- the next start, before anything is read.
ALTER TABLE histograms RENAME TO unpacked_histograms;

CREATE TABLE histograms (
    content_id VARCHAR NOT NULL,
    phase VARCHAR NOT NULL CHECK (phase IN ('prefill', 'decode')),
    tokens UBIGINT NOT NULL,
    blocks UINTEGER[] NOT NULL,
    n_experts UINTEGER[] NOT NULL,
    layer_tokens UBIGINT[] NOT NULL,
    counts BLOB NOT NULL USING COMPRESSION uncompressed,
    reuse BLOB USING COMPRESSION uncompressed,
    PRIMARY KEY (content_id, phase)
);
