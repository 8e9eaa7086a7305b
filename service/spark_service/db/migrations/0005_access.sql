-- Bearer tokens. Of a secret only its SHA-256 is kept: 256 random bits cannot be found by trying, however fast the hash.
-- Times are UTC, to the second. previous_sha256 is the secret before a rotation, valid until previous_ends_at.
CREATE TABLE tokens (
    token_id VARCHAR PRIMARY KEY,
    name VARCHAR NOT NULL,
    scope VARCHAR NOT NULL CHECK (scope IN ('upload', 'read', 'upload read', 'admin')),
    secret_sha256 BLOB NOT NULL,
    created_at TIMESTAMP NOT NULL,
    expires_at TIMESTAMP,
    revoked_at TIMESTAMP,
    rotated_at TIMESTAMP,
    previous_sha256 BLOB,
    previous_ends_at TIMESTAMP,
    last_used_day DATE
);

-- Every write and every token action, in the transaction of what it records.
-- No primary key: an index would grow with every upload, and entries are read by ranges, which need none.
CREATE SEQUENCE audit_entries;
CREATE TABLE audit_log (
    entry BIGINT NOT NULL DEFAULT nextval('audit_entries'),
    recorded_at TIMESTAMP NOT NULL,
    actor VARCHAR NOT NULL,
    action VARCHAR NOT NULL,
    object VARCHAR NOT NULL,
    detail_json VARCHAR NOT NULL
);

-- Parts removed by age: an agent that sends one again must not bring it back. A content id is a hash of the counts.
CREATE TABLE expired_parts (
    content_id VARCHAR PRIMARY KEY
);
