-- What parts missed in decode while they ran with tiers. It stays here when their counts move into a segment.
CREATE TABLE live (
    content_id VARCHAR PRIMARY KEY,
    selections UBIGINT NOT NULL,
    cold_hits UBIGINT NOT NULL,
    resident_bytes UBIGINT NOT NULL,
    -- The manifest that was followed; all null without one.
    profile_workload VARCHAR,
    profile_revision VARCHAR,
    vram_budget_bytes UBIGINT
);

-- What is known of a workload's traffic against what its manifests promised, as of the last look.
CREATE TABLE drift (
    fingerprint VARCHAR NOT NULL,
    workload VARCHAR NOT NULL,
    state VARCHAR NOT NULL CHECK (state IN ('steady', 'moved')),
    -- Traffic before this day is of another kind; kept until an administrator clears it.
    since_day DATE,
    -- Whether profiles are built from the traffic since then alone.
    rebuilt BOOLEAN NOT NULL,
    -- Of the manifests served by the time of the last change, the latest: those are no measure of what came after.
    after_sequence BIGINT NOT NULL,
    n_sessions UBIGINT NOT NULL,
    promised DOUBLE,
    promised_low DOUBLE,
    promised_high DOUBLE,
    measured DOUBLE,
    measured_low DOUBLE,
    measured_high DOUBLE,
    PRIMARY KEY (fingerprint, workload)
);
