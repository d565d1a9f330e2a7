-- The schema of a new file: what the scripts in `migrations` make of an empty one. Made by tools/whole_schema.py.


CREATE TABLE meta (
    key   TEXT PRIMARY KEY NOT NULL,
    value INTEGER NOT NULL
) WITHOUT ROWID;

INSERT INTO meta VALUES ('epoch', 0);

CREATE TABLE entries (
    run_id      TEXT    NOT NULL,
    seq         INTEGER NOT NULL,
    kind        TEXT    NOT NULL,
    position    TEXT,
    attempt     INTEGER,
    body        BLOB    NOT NULL,
    roots       BLOB    NOT NULL,
    digest      BLOB,
    fingerprint BLOB,
    encoding    TEXT,
    payload     BLOB,
    UNIQUE (run_id, seq)
);

CREATE TABLE payloads (
    run_id TEXT NOT NULL,
    digest BLOB NOT NULL,
    bytes  BLOB,
    UNIQUE (run_id, digest)
);

CREATE TABLE runs (
    run_id        TEXT    NOT NULL UNIQUE,
    owner         TEXT,
    fencing_token INTEGER NOT NULL,
    lease_until   REAL,
    lease_seconds REAL,
    lease_boot    TEXT,
    inbox         INTEGER NOT NULL DEFAULT 0,
    note          TEXT
, created_at REAL, agent TEXT, queue TEXT, priority INTEGER NOT NULL DEFAULT 0 CHECK (typeof(priority) = 'integer'), key TEXT, due REAL CHECK (due IS NULL OR typeof(due) = 'real' AND queue IS NOT NULL), moved_to TEXT CHECK (moved_to IS NULL OR owner IS NULL AND due IS NULL), deaths INTEGER NOT NULL DEFAULT 0 CHECK (typeof(deaths) = 'integer'), deaths_after INTEGER);

CREATE INDEX runs_of_an_owner ON runs (owner) WHERE owner IS NOT NULL;

CREATE TABLE inbox (
    run_id  TEXT    NOT NULL,
    id      INTEGER NOT NULL,
    kind    TEXT    NOT NULL,
    payload BLOB    NOT NULL,
    who     TEXT    NOT NULL,
    at      REAL    NOT NULL,
    UNIQUE (run_id, id)
);

CREATE TABLE secrets (
    run_id TEXT NOT NULL UNIQUE,
    secret BLOB
);

CREATE TABLE tombstones (
    run_id TEXT    NOT NULL UNIQUE,
    size   INTEGER NOT NULL,
    root   BLOB    NOT NULL,
    who    TEXT    NOT NULL,
    why    TEXT    NOT NULL,
    at     REAL    NOT NULL
);

CREATE TRIGGER entries_follow_one_another BEFORE INSERT ON entries
WHEN NEW.run_id IS NOT NULL AND (
    NEW.seq <> 1 + coalesce((SELECT max(seq) FROM entries WHERE run_id = NEW.run_id), 0)
    OR EXISTS (SELECT 1 FROM entries WHERE rowid = NEW.rowid)
)
BEGIN
    SELECT RAISE(ABORT, 'the ledger is append-only: an entry must have the seq that follows its run''s last one');
END;

CREATE TRIGGER entries_are_never_deleted BEFORE DELETE ON entries
WHEN NOT EXISTS (SELECT 1 FROM tombstones WHERE run_id = OLD.run_id)
BEGIN
    SELECT RAISE(ABORT, 'the ledger is append-only: entries can be deleted only of an ended run that has a tombstone');
END;

CREATE TRIGGER payloads_are_never_replaced BEFORE INSERT ON payloads
WHEN EXISTS (
    SELECT 1 FROM payloads
    WHERE run_id = NEW.run_id AND digest = NEW.digest AND bytes IS NOT NULL AND bytes IS NOT NEW.bytes
) OR EXISTS (SELECT 1 FROM payloads WHERE rowid = NEW.rowid)
BEGIN
    SELECT RAISE(ABORT, 'the ledger is append-only: this payload is stored already, with other bytes');
END;

CREATE TRIGGER tombstones_are_for_ended_runs BEFORE INSERT ON tombstones
WHEN coalesce((
    SELECT CASE WHEN json_valid(CAST(body AS TEXT)) THEN json_extract(CAST(body AS TEXT), '$.state') END
    FROM entries WHERE run_id = NEW.run_id ORDER BY seq DESC LIMIT 1
), '') NOT IN ('COMPLETED', 'FAILED', 'DEAD_LETTER', 'CANCELLED')
    OR EXISTS (SELECT 1 FROM tombstones WHERE run_id = NEW.run_id OR rowid = NEW.rowid)
BEGIN
    SELECT RAISE(ABORT, 'a run can be deleted once, and only after it has ended');
END;

CREATE TRIGGER tombstones_are_never_changed BEFORE UPDATE ON tombstones
BEGIN
    SELECT RAISE(ABORT, 'a tombstone can be neither changed nor deleted');
END;

CREATE TRIGGER tombstones_are_never_deleted BEFORE DELETE ON tombstones
BEGIN
    SELECT RAISE(ABORT, 'a tombstone can be neither changed nor deleted');
END;

CREATE TRIGGER runs_keep_their_ids BEFORE INSERT ON runs
WHEN EXISTS (SELECT 1 FROM tombstones WHERE run_id = NEW.run_id)
    OR EXISTS (SELECT 1 FROM runs WHERE run_id = NEW.run_id OR rowid = NEW.rowid)
BEGIN
    SELECT RAISE(ABORT, 'a run of this id exists, or existed and was deleted');
END;

CREATE TRIGGER runs_never_lower_their_tokens BEFORE UPDATE OF run_id, fencing_token ON runs
WHEN NEW.run_id IS NOT OLD.run_id OR NEW.fencing_token < OLD.fencing_token
BEGIN
    SELECT RAISE(ABORT, 'a run keeps its id, and its fencing token never goes down');
END;

CREATE TRIGGER runs_are_never_deleted BEFORE DELETE ON runs
WHEN NOT EXISTS (SELECT 1 FROM tombstones WHERE run_id = OLD.run_id)
BEGIN
    SELECT RAISE(ABORT, 'the ledger is append-only: only an ended run that has a tombstone can be deleted');
END;

CREATE VIEW agent_runs AS
SELECT
    r.run_id,
    json_extract(f.payload, '$.goal') AS goal,
    CASE
        WHEN r.note IS NOT NULL
            AND json_extract(l.body, '$.state') NOT IN ('COMPLETED', 'FAILED', 'DEAD_LETTER', 'CANCELLED') THEN 'BLOCKED'
        ELSE json_extract(l.body, '$.state')
    END AS status,
    json_extract(l.body, '$.steps') AS total_steps,
    json_extract(f.body, '$.at') AS created_at,
    json_extract(l.body, '$.at') AS updated_at
FROM runs r
JOIN readable_entries f ON f.run_id = r.run_id AND f.seq = 1
JOIN readable_entries l ON l.run_id = r.run_id AND l.seq = (SELECT max(seq) FROM entries WHERE run_id = r.run_id);

CREATE VIEW step_entries AS
SELECT
    run_id,
    min(CASE WHEN kind = 'intent' THEN seq END) AS first_intent,
    max(CASE WHEN kind = 'outcome' THEN seq END) AS last_outcome,
    max(CASE WHEN kind IN ('intent', 'outcome') THEN seq END) AS last_dispatch,
    max(CASE WHEN kind IN ('asked', 'parked', 'resolved') THEN seq ELSE 0 END) AS last_doubt,
    max(CASE WHEN json_extract(body, '$.step_state') IS NOT NULL THEN seq END) AS last_state,
    max(seq) AS last_entry
FROM readable_entries
WHERE position IS NOT NULL
GROUP BY run_id, position
HAVING first_intent IS NOT NULL;

CREATE VIEW run_steps AS
SELECT
    'step_' || lower(hex(substr(i.roots, 1, 10))) AS step_id,
    g.run_id,
    json_extract(i.body, '$.step') AS step_number,
    json_extract(i.body, '$.tool') AS tool_name,
    i.payload AS arguments_json,
    json_extract(s.body, '$.step_state') AS state,
    CASE WHEN json_extract(o.body, '$.ok') = 'completed' THEN o.payload END AS output_json,
    CASE WHEN json_extract(o.body, '$.ok') <> 'completed' THEN
        json_extract(o.payload, '$.type') || coalesce(': ' || nullif(json_extract(o.payload, '$.message'), ''), '')
    END AS error_message,
    lower(nullif(hex(i.fingerprint), '')) AS fingerprint,
    json_extract(i.body, '$.at') AS created_at,
    CASE WHEN g.last_dispatch = g.last_outcome AND g.last_outcome > g.last_doubt THEN json_extract(o.body, '$.at') END AS completed_at,
    g.last_entry AS state_version,
    json_extract(i.body, '$.key') AS idempotency_key,
    lower(nullif(hex(i.digest), '')) AS input_digest,
    CASE WHEN json_extract(o.body, '$.ok') = 'completed' THEN lower(nullif(hex(o.digest), '')) END AS output_digest,
    json_extract(d.body, '$.left') AS retry_budget_remaining,
    json_extract(l.body, '$.token') AS fencing_token
FROM step_entries g
JOIN readable_entries i ON i.run_id = g.run_id AND i.seq = g.first_intent
LEFT JOIN readable_entries o ON o.run_id = g.run_id AND o.seq = g.last_outcome
LEFT JOIN readable_entries d ON d.run_id = g.run_id AND d.seq = g.last_dispatch
LEFT JOIN readable_entries s ON s.run_id = g.run_id AND s.seq = g.last_state
LEFT JOIN readable_entries l ON l.run_id = g.run_id AND l.seq = g.last_entry
ORDER BY g.run_id, g.first_intent;

CREATE VIEW agent_step_journal AS
SELECT
    g.run_id AS task_id,
    json_extract(i.body, '$.step') AS step_index,
    json_extract(i.body, '$.tool') AS tool_name,
    json_extract(i.body, '$.key') AS idempotency_key,
    i.payload AS arguments_json,
    CASE
        WHEN g.last_dispatch = g.last_outcome AND g.last_outcome > g.last_doubt THEN
            CASE WHEN json_extract(o.body, '$.ok') = 'completed' THEN 'committed' ELSE 'failed' END
        WHEN r.owner IS NOT NULL AND r.fencing_token = json_extract(d.body, '$.token') THEN 'pending'
        ELSE 'in_doubt'
    END AS status,
    CASE WHEN json_extract(o.body, '$.ok') = 'completed' THEN o.payload END AS output_json,
    json_extract(i.body, '$.at') AS created_at,
    json_extract(l.body, '$.at') AS updated_at
FROM step_entries g
LEFT JOIN runs r ON r.run_id = g.run_id
JOIN readable_entries i ON i.run_id = g.run_id AND i.seq = g.first_intent
LEFT JOIN readable_entries o ON o.run_id = g.run_id AND o.seq = g.last_outcome
LEFT JOIN readable_entries d ON d.run_id = g.run_id AND d.seq = g.last_dispatch
LEFT JOIN readable_entries l ON l.run_id = g.run_id AND l.seq = g.last_entry
ORDER BY g.run_id, g.first_intent;

CREATE INDEX runs_that_wait ON runs (queue, agent, priority, due, key) WHERE owner IS NULL AND due IS NOT NULL;

CREATE INDEX runs_that_are_busy ON runs (queue, key) WHERE owner IS NOT NULL AND due IS NOT NULL;

CREATE TABLE boots (
    boot    TEXT    NOT NULL UNIQUE,
    ahead   REAL    NOT NULL,
    reached REAL    NOT NULL,
    news    INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE workers (
    worker TEXT NOT NULL UNIQUE,
    said   BLOB NOT NULL,
    beat   REAL NOT NULL
);

CREATE TRIGGER payloads_are_never_changed BEFORE UPDATE ON payloads
WHEN NOT (
    NEW.rowid = OLD.rowid AND NEW.run_id IS OLD.run_id AND NEW.digest IS OLD.digest AND (
        OLD.bytes IS NULL
        OR NEW.bytes IS NULL AND (SELECT kind FROM entries WHERE run_id = OLD.run_id ORDER BY seq DESC LIMIT 1) = 'erased'
    )
)
BEGIN
    SELECT RAISE(ABORT, 'the ledger is append-only: a payload can be erased, behind an entry that says so, and not changed');
END;

CREATE TRIGGER payloads_are_never_deleted BEFORE DELETE ON payloads
WHEN OLD.bytes IS NOT NULL AND NOT EXISTS (SELECT 1 FROM tombstones WHERE run_id = OLD.run_id)
BEGIN
    SELECT RAISE(ABORT, 'the ledger is append-only: payloads can be deleted once they are erased, or of an ended run that has a tombstone');
END;

CREATE TRIGGER secrets_are_never_changed BEFORE UPDATE ON secrets
WHEN NOT (
    NEW.run_id IS OLD.run_id AND (
        NEW.secret IS NULL AND (SELECT kind FROM entries WHERE run_id = OLD.run_id ORDER BY seq DESC LIMIT 1) = 'erased'
        OR length(OLD.secret) > 32 AND length(NEW.secret) > 32
    )
)
BEGIN
    SELECT RAISE(ABORT, 'a run''s secret can be erased, behind an entry that says so, and not changed');
END;

CREATE TRIGGER secrets_are_never_deleted BEFORE DELETE ON secrets
WHEN NOT EXISTS (SELECT 1 FROM tombstones WHERE run_id = OLD.run_id)
BEGIN
    SELECT RAISE(ABORT, 'a run''s secret can be deleted only with a run that has a tombstone');
END;

CREATE TRIGGER entries_are_never_changed BEFORE UPDATE ON entries
WHEN NOT (
    NEW.rowid = OLD.rowid AND NEW.run_id IS OLD.run_id AND NEW.seq IS OLD.seq AND NEW.kind IS OLD.kind
    AND NEW.position IS OLD.position AND NEW.attempt IS OLD.attempt AND NEW.body IS OLD.body AND NEW.roots IS OLD.roots
    AND (
        NEW.payload IS NULL AND NEW.digest IS NULL AND NEW.fingerprint IS NULL AND NEW.encoding IS NULL
        OR OLD.encoding IN ('packed', 'packed, aes-256-gcm') AND OLD.payload IS NOT NULL AND NEW.payload IS NOT NULL
        AND NEW.digest IS OLD.digest AND NEW.fingerprint IS OLD.fingerprint AND NEW.encoding IS OLD.encoding
    )
    AND (SELECT kind FROM entries WHERE run_id = OLD.run_id ORDER BY seq DESC LIMIT 1) = 'erased'
)
BEGIN
    SELECT RAISE(ABORT, 'the ledger is append-only: of an entry only the payload can be erased, together with its digest, fingerprint and encoding, behind an entry that says so');
END;

CREATE VIEW readable_entries AS
SELECT
    run_id, seq, kind, position, roots, digest, fingerprint,
    CASE WHEN json_valid(body) THEN body END AS body,
    CASE WHEN json_valid(payload) THEN payload END AS payload
FROM (
    SELECT
        run_id, seq, kind, position, roots,
        CASE WHEN coalesce(encoding, 'packed') = 'packed' THEN digest END AS digest,
        CASE WHEN coalesce(encoding, 'packed') = 'packed' THEN fingerprint END AS fingerprint,
        CAST(body AS TEXT) AS body,
        CASE WHEN encoding IS NULL THEN CAST(coalesce(payload, (
            SELECT bytes FROM payloads p WHERE p.run_id = entries.run_id AND p.digest = entries.digest
        )) AS TEXT) END AS payload
    FROM entries
);
