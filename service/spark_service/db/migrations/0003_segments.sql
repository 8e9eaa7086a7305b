-- Files that hold histograms which have aged out of the database: each of one model and phase, sorted by content id.
-- A file counts from the moment it stands here; any other file of the folder is left over from a crash.
CREATE TABLE segments (
    name VARCHAR PRIMARY KEY,
    fingerprint VARCHAR NOT NULL,
    phase VARCHAR NOT NULL CHECK (phase IN ('prefill', 'decode')),
    n_rows UBIGINT NOT NULL,
    n_bytes UBIGINT NOT NULL
);

-- Which file holds which histogram. A histogram is in the table of that name or here, never in both.
CREATE TABLE segment_rows (
    content_id VARCHAR NOT NULL,
    phase VARCHAR NOT NULL CHECK (phase IN ('prefill', 'decode')),
    segment VARCHAR NOT NULL,
    PRIMARY KEY (content_id, phase)
);
