-- Schema 5. What may be erased, and when: behind an entry that says so, and nowhere else. So a payload is never gone without a word in
-- the log, whoever has the file. What is encrypted keeps its digests to itself.
DROP TRIGGER entries_are_never_changed;
CREATE TRIGGER entries_are_never_changed BEFORE UPDATE ON entries
WHEN NOT (
    NEW.rowid = OLD.rowid AND NEW.run_id IS OLD.run_id AND NEW.seq IS OLD.seq AND NEW.kind IS OLD.kind
    AND NEW.position IS OLD.position AND NEW.attempt IS OLD.attempt AND NEW.body IS OLD.body AND NEW.roots IS OLD.roots
    AND NEW.payload IS NULL AND NEW.digest IS NULL AND NEW.fingerprint IS NULL AND NEW.encoding IS NULL
    AND (SELECT kind FROM entries WHERE run_id = OLD.run_id ORDER BY seq DESC LIMIT 1) = 'erased'
)
BEGIN
    SELECT RAISE(ABORT, 'the ledger is append-only: of an entry only the payload can be erased, together with its digest, fingerprint and encoding, behind an entry that says so');
END;

-- What was erased may be written again by a later entry that carries the same bytes.
DROP TRIGGER payloads_are_never_changed;
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

-- The digest goes, too, once the bytes are erased.
DROP TRIGGER payloads_are_never_deleted;
CREATE TRIGGER payloads_are_never_deleted BEFORE DELETE ON payloads
WHEN OLD.bytes IS NOT NULL AND NOT EXISTS (SELECT 1 FROM tombstones WHERE run_id = OLD.run_id)
BEGIN
    SELECT RAISE(ABORT, 'the ledger is append-only: payloads can be deleted once they are erased, or of an ended run that has a tombstone');
END;

-- A secret of 32 bytes stands there plainly; a longer one is sealed under a key of somebody's, and can be sealed under another one.
DROP TRIGGER secrets_are_never_changed;
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

DROP VIEW readable_entries;
CREATE VIEW readable_entries AS
SELECT
    run_id, seq, kind, position, roots, digest, fingerprint,
    CASE WHEN json_valid(body) THEN body END AS body,
    CASE WHEN json_valid(payload) THEN payload END AS payload
FROM (
    SELECT
        run_id, seq, kind, position, roots,
        CASE WHEN encoding IS NULL THEN digest END AS digest,
        CASE WHEN encoding IS NULL THEN fingerprint END AS fingerprint,
        CAST(body AS TEXT) AS body,
        CASE WHEN encoding IS NULL THEN CAST(coalesce(payload, (
            SELECT bytes FROM payloads p WHERE p.run_id = entries.run_id AND p.digest = entries.digest
        )) AS TEXT) END AS payload
    FROM entries
);
