-- Schema 3. What is encrypted keeps its digests to itself.
CREATE OR REPLACE VIEW readable_entries AS
SELECT
    run_id, seq, kind, position, roots,
    CASE WHEN encoding IS NULL THEN digest END AS digest,
    CASE WHEN encoding IS NULL THEN fingerprint END AS fingerprint,
    readable_json(body) AS body,
    CASE WHEN encoding IS NULL THEN readable_json(coalesce(payload, (
        SELECT bytes FROM payloads p WHERE p.run_id = entries.run_id AND p.digest = entries.digest
    ))) END AS payload
FROM entries;
