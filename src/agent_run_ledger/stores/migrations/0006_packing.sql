-- Schema 6. A payload may be packed, with pieces that are copied from earlier entries of its run. Where one of these is erased, what stays
-- is packed anew: behind the entry that says so, as the same payload under the same digest, and in no other way.
DROP TRIGGER entries_are_never_changed;
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

-- What is packed is not encrypted: its digests are shown. The payload itself no statement of SQL can put together.
DROP VIEW readable_entries;
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
