-- Schema 1. Runs inside one transaction; what is written here is never edited, only followed by 0002. Names are not qualified: the
-- search path says in which schema the ledger stands. A comment before a semicolon says by what a table can be partitioned.
-- Text that is a key is compared byte by byte: faster, and no index of it breaks when a system gets other locales.

-- The numbers of this ledger: 'schema', 'epoch', and whether 'triggers' keep its log append-only.
CREATE TABLE meta (
    key   TEXT COLLATE "C" PRIMARY KEY,
    value BIGINT NOT NULL
);
INSERT INTO meta (key, value) VALUES ('epoch', 0);

-- The log.
CREATE TABLE entries (
    run_id      TEXT COLLATE "C" NOT NULL,
    seq         BIGINT NOT NULL CHECK (seq > 0),
    kind        TEXT   NOT NULL,
    position    TEXT,
    attempt     BIGINT,
    body        BYTEA  NOT NULL,
    roots       BYTEA  NOT NULL,
    digest      BYTEA,
    fingerprint BYTEA,
    encoding    TEXT,
    payload     BYTEA,
    PRIMARY KEY (run_id, seq)
) /* PARTITION BY HASH (run_id) */;

-- Large payloads, once per run and digest.
CREATE TABLE payloads (
    run_id TEXT COLLATE "C" NOT NULL,
    digest BYTEA NOT NULL,
    bytes  BYTEA,
    PRIMARY KEY (run_id, digest)
) /* PARTITION BY HASH (run_id) */;

-- The heads. Only the lease and the note are not found in the log as well, and they prove nothing. All times but `created_at`, which
-- its program wrote into its first entry, are of the database's clock.
CREATE TABLE runs (
    run_id        TEXT COLLATE "C" NOT NULL,
    owner         TEXT,
    fencing_token BIGINT NOT NULL,
    lease_until   DOUBLE PRECISION,
    lease_seconds DOUBLE PRECISION,
    lease_call    TEXT,
    inbox         BIGINT NOT NULL DEFAULT 0,
    note          TEXT,
    created_at    DOUBLE PRECISION NOT NULL,
    made          DOUBLE PRECISION NOT NULL DEFAULT extract(epoch FROM clock_timestamp()),
    agent         TEXT COLLATE "C",
    queue         TEXT COLLATE "C",
    priority      BIGINT NOT NULL DEFAULT 0,
    key           TEXT COLLATE "C",
    due           DOUBLE PRECISION CHECK (due IS NULL OR queue IS NOT NULL),
    moved_to      TEXT CHECK (moved_to IS NULL OR (owner IS NULL AND due IS NULL)),
    PRIMARY KEY (run_id)
) /* PARTITION BY HASH (run_id) */;
CREATE INDEX runs_in_order ON runs (made, run_id);
-- What a worker looks for, and what its limits count. A renewal changes nothing that stands in any index: it stays on its page.
CREATE INDEX runs_ready ON runs (queue, agent, priority DESC, due) WHERE owner IS NULL AND due IS NOT NULL;
CREATE INDEX runs_busy ON runs (queue, key) WHERE owner IS NOT NULL AND due IS NOT NULL;

-- The nonce names the call that posted: where its answer was lost and it is made again, the request is not.
CREATE TABLE inbox (
    run_id  TEXT COLLATE "C" NOT NULL,
    id      BIGINT NOT NULL,
    kind    TEXT   NOT NULL,
    payload BYTEA  NOT NULL,
    who     TEXT   NOT NULL,
    at      DOUBLE PRECISION NOT NULL,
    nonce   TEXT COLLATE "C",
    PRIMARY KEY (run_id, id),
    UNIQUE (run_id, nonce)
) /* PARTITION BY HASH (run_id) */;

-- The salt of a run's digests: without it nobody can guess what an erased payload was.
CREATE TABLE secrets (
    run_id TEXT COLLATE "C" NOT NULL,
    secret BYTEA,
    PRIMARY KEY (run_id)
) /* PARTITION BY HASH (run_id) */;

-- What is left of a deleted run: how long its log was, its root, and who deleted it and why.
CREATE TABLE tombstones (
    run_id TEXT COLLATE "C" NOT NULL,
    size   BIGINT NOT NULL,
    root   BYTEA  NOT NULL,
    who    TEXT   NOT NULL,
    why    TEXT   NOT NULL,
    at     DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (run_id)
) /* PARTITION BY HASH (run_id) */;

-- A row here is locked by whoever claims runs of a queue that is limited.
CREATE TABLE queues (
    name TEXT COLLATE "C" PRIMARY KEY
);

-- What workers say of themselves, and when they said so first and last.
CREATE TABLE workers (
    worker TEXT COLLATE "C" PRIMARY KEY,
    said   BYTEA NOT NULL,
    since  DOUBLE PRECISION NOT NULL DEFAULT extract(epoch FROM clock_timestamp()),
    at     DOUBLE PRECISION NOT NULL
);


-- What people and their tools read: the three views below. A body or payload that is not JSON (somebody wrote into the table) gives
-- NULLs, never an error. What a statement of SQL cannot try before it does it, these functions can.

CREATE FUNCTION readable_json(bytes BYTEA) RETURNS TEXT LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    said TEXT;
BEGIN
    said := convert_from(bytes, 'UTF8');
    PERFORM said::json;
    RETURN said;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$;

CREATE FUNCTION json_text(document TEXT, member TEXT) RETURNS TEXT LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN document::json ->> member;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$;

CREATE FUNCTION json_number(document TEXT, member TEXT) RETURNS DOUBLE PRECISION LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN (document::json ->> member)::double precision;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$;

CREATE VIEW readable_entries AS
SELECT
    run_id, seq, kind, position, roots, digest, fingerprint,
    readable_json(body) AS body,
    CASE WHEN encoding IS NULL THEN readable_json(coalesce(payload, (
        SELECT bytes FROM payloads p WHERE p.run_id = entries.run_id AND p.digest = entries.digest
    ))) END AS payload
FROM entries;

CREATE VIEW agent_runs AS
SELECT
    r.run_id,
    json_text(f.payload, 'goal') AS goal,
    CASE
        WHEN r.note IS NOT NULL
            AND json_text(l.body, 'state') NOT IN ('COMPLETED', 'FAILED', 'DEAD_LETTER', 'CANCELLED') THEN 'BLOCKED'
        ELSE json_text(l.body, 'state')
    END AS status,
    json_number(l.body, 'steps')::bigint AS total_steps,
    json_number(f.body, 'at') AS created_at,
    json_number(l.body, 'at') AS updated_at
FROM runs r
JOIN readable_entries f ON f.run_id = r.run_id AND f.seq = 1
JOIN readable_entries l ON l.run_id = r.run_id AND l.seq = (SELECT max(seq) FROM entries WHERE run_id = r.run_id);

-- One row per position that has an intent: which of its entries say what.
CREATE VIEW step_entries AS
SELECT
    run_id,
    min(CASE WHEN kind = 'intent' THEN seq END) AS first_intent,
    max(CASE WHEN kind = 'outcome' THEN seq END) AS last_outcome,
    max(CASE WHEN kind IN ('intent', 'outcome') THEN seq END) AS last_dispatch,
    max(CASE WHEN kind IN ('asked', 'parked', 'resolved') THEN seq ELSE 0 END) AS last_doubt,
    max(CASE WHEN json_text(readable_json(body), 'step_state') IS NOT NULL THEN seq END) AS last_state,
    max(seq) AS last_entry
FROM entries
WHERE position IS NOT NULL
GROUP BY run_id, position
HAVING min(CASE WHEN kind = 'intent' THEN seq END) IS NOT NULL;

CREATE VIEW run_steps AS
SELECT
    'step_' || encode(substr(i.roots, 1, 10), 'hex') AS step_id,
    g.run_id,
    json_number(i.body, 'step')::bigint AS step_number,
    json_text(i.body, 'tool') AS tool_name,
    i.payload AS arguments_json,
    json_text(s.body, 'step_state') AS state,
    CASE WHEN json_text(o.body, 'ok') = 'completed' THEN o.payload END AS output_json,
    CASE WHEN json_text(o.body, 'ok') <> 'completed' THEN
        json_text(o.payload, 'type') || coalesce(': ' || nullif(json_text(o.payload, 'message'), ''), '')
    END AS error_message,
    nullif(encode(i.fingerprint, 'hex'), '') AS fingerprint,
    json_number(i.body, 'at') AS created_at,
    CASE WHEN g.last_dispatch = g.last_outcome AND g.last_outcome > g.last_doubt THEN json_number(o.body, 'at') END AS completed_at,
    g.last_entry AS state_version,
    json_text(i.body, 'key') AS idempotency_key,
    nullif(encode(i.digest, 'hex'), '') AS input_digest,
    CASE WHEN json_text(o.body, 'ok') = 'completed' THEN nullif(encode(o.digest, 'hex'), '') END AS output_digest,
    json_number(d.body, 'left')::bigint AS retry_budget_remaining,
    json_number(l.body, 'token')::bigint AS fencing_token
FROM step_entries g
JOIN readable_entries i ON i.run_id = g.run_id AND i.seq = g.first_intent
LEFT JOIN readable_entries o ON o.run_id = g.run_id AND o.seq = g.last_outcome
LEFT JOIN readable_entries d ON d.run_id = g.run_id AND d.seq = g.last_dispatch
LEFT JOIN readable_entries s ON s.run_id = g.run_id AND s.seq = g.last_state
LEFT JOIN readable_entries l ON l.run_id = g.run_id AND l.seq = g.last_entry
ORDER BY g.run_id, g.first_intent;

-- The same steps as a journal of dispatches. A step is in doubt when who dispatched it last no longer holds the run.
CREATE VIEW agent_step_journal AS
SELECT
    g.run_id AS task_id,
    json_number(i.body, 'step')::bigint AS step_index,
    json_text(i.body, 'tool') AS tool_name,
    json_text(i.body, 'key') AS idempotency_key,
    i.payload AS arguments_json,
    CASE
        WHEN g.last_dispatch = g.last_outcome AND g.last_outcome > g.last_doubt THEN
            CASE WHEN json_text(o.body, 'ok') = 'completed' THEN 'committed' ELSE 'failed' END
        WHEN r.owner IS NOT NULL AND r.fencing_token = json_number(d.body, 'token') THEN 'pending'
        ELSE 'in_doubt'
    END AS status,
    CASE WHEN json_text(o.body, 'ok') = 'completed' THEN o.payload END AS output_json,
    json_number(i.body, 'at') AS created_at,
    json_number(l.body, 'at') AS updated_at
FROM step_entries g
LEFT JOIN runs r ON r.run_id = g.run_id
JOIN readable_entries i ON i.run_id = g.run_id AND i.seq = g.first_intent
LEFT JOIN readable_entries o ON o.run_id = g.run_id AND o.seq = g.last_outcome
LEFT JOIN readable_entries d ON d.run_id = g.run_id AND d.seq = g.last_dispatch
LEFT JOIN readable_entries l ON l.run_id = g.run_id AND l.seq = g.last_entry
ORDER BY g.run_id, g.first_intent;
