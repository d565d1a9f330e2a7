-- Where an entry is erased that others copy from, what stays is packed anew: behind the entry that says so, as the same payload under the
-- same digest, and in no other way.

DROP TRIGGER entries_are_never_changed ON entries;
CREATE TRIGGER entries_are_never_changed BEFORE UPDATE ON entries FOR EACH ROW
WHEN (NOT (
    NEW.run_id = OLD.run_id AND NEW.seq = OLD.seq AND NEW.kind = OLD.kind
    AND NEW.position IS NOT DISTINCT FROM OLD.position AND NEW.attempt IS NOT DISTINCT FROM OLD.attempt
    AND NEW.body = OLD.body AND NEW.roots = OLD.roots
    AND (
        (NEW.payload IS NULL AND NEW.digest IS NULL AND NEW.fingerprint IS NULL AND NEW.encoding IS NULL)
        OR (
            coalesce(OLD.encoding, '') IN ('packed', 'packed, aes-256-gcm') AND OLD.payload IS NOT NULL AND NEW.payload IS NOT NULL
            AND NEW.digest IS NOT DISTINCT FROM OLD.digest AND NEW.fingerprint IS NOT DISTINCT FROM OLD.fingerprint
            AND NEW.encoding IS NOT DISTINCT FROM OLD.encoding
        )
    )
))
EXECUTE FUNCTION refuse('the ledger is append-only: of an entry only the payload can be erased, together with its digest, fingerprint and encoding');
