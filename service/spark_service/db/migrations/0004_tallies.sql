-- The order in which parts were committed: what is newer than a tally has a higher number than the tally's.
CREATE SEQUENCE part_numbers;
ALTER TABLE parts ADD COLUMN number BIGINT DEFAULT nextval('part_numbers');

-- Votes of a workload's sessions in a phase, counted up to a number. A cache: without a row everything is counted anew.
CREATE TABLE tallies (
    fingerprint VARCHAR NOT NULL,
    workload VARCHAR NOT NULL,
    phase VARCHAR NOT NULL CHECK (phase IN ('prefill', 'decode')),
    number BIGINT NOT NULL,
    tally BLOB NOT NULL,
    PRIMARY KEY (fingerprint, workload, phase)
);
