-- Schema 4. A payload may be packed, with pieces that are copied from earlier entries of its run. It is not encrypted: its digests are
-- shown. The payload itself no statement of SQL can put together.
CREATE OR REPLACE VIEW readable_entries AS
SELECT
    run_id, seq, kind, position, roots,
    CASE WHEN coalesce(encoding, 'packed') = 'packed' THEN digest END AS digest,
    CASE WHEN coalesce(encoding, 'packed') = 'packed' THEN fingerprint END AS fingerprint,
    readable_json(body) AS body,
    CASE WHEN encoding IS NULL THEN readable_json(coalesce(payload, (
        SELECT bytes FROM payloads p WHERE p.run_id = entries.run_id AND p.digest = entries.digest
    ))) END AS payload
FROM entries;
