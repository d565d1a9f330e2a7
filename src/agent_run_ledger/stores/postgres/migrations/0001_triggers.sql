-- Append-only, by the database itself. An engine without triggers keeps it by the rights of the role alone: `migrate --no-triggers`.
-- What a condition can say stands in WHEN, so that the function is called only to refuse.

CREATE FUNCTION refuse() RETURNS TRIGGER LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '%', TG_ARGV[0] USING ERRCODE = 'integrity_constraint_violation';
END $$;

CREATE FUNCTION refuse_without_tombstone() RETURNS TRIGGER LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM tombstones WHERE run_id = OLD.run_id) THEN
        RAISE EXCEPTION '%', TG_ARGV[0] USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN OLD;
END $$;

CREATE FUNCTION refuse_with_tombstone() RETURNS TRIGGER LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM tombstones WHERE run_id = NEW.run_id) THEN
        RAISE EXCEPTION '%', TG_ARGV[0] USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION refuse_before_the_end() RETURNS TRIGGER LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF coalesce((
        SELECT json_text(readable_json(body), 'state') FROM entries WHERE run_id = NEW.run_id ORDER BY seq DESC LIMIT 1
    ), '') NOT IN ('COMPLETED', 'FAILED', 'DEAD_LETTER', 'CANCELLED') THEN
        RAISE EXCEPTION '%', TG_ARGV[0] USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END $$;

-- Two entries of one seq the key refuses; a gap every append of ours refuses itself, and `verify` finds any other.
CREATE TRIGGER entries_are_never_changed BEFORE UPDATE ON entries FOR EACH ROW
WHEN (NOT (
    NEW.run_id = OLD.run_id AND NEW.seq = OLD.seq AND NEW.kind = OLD.kind
    AND NEW.position IS NOT DISTINCT FROM OLD.position AND NEW.attempt IS NOT DISTINCT FROM OLD.attempt
    AND NEW.body = OLD.body AND NEW.roots = OLD.roots
    AND NEW.payload IS NULL AND NEW.digest IS NULL AND NEW.fingerprint IS NULL AND NEW.encoding IS NULL
))
EXECUTE FUNCTION refuse('the ledger is append-only: of an entry only the payload can be erased, together with its digest, fingerprint and encoding');

CREATE TRIGGER entries_are_never_deleted BEFORE DELETE ON entries FOR EACH ROW
EXECUTE FUNCTION refuse_without_tombstone('the ledger is append-only: entries can be deleted only of an ended run that has a tombstone');

CREATE TRIGGER entries_are_never_truncated BEFORE TRUNCATE ON entries
EXECUTE FUNCTION refuse('the ledger is append-only: its entries cannot be truncated');

-- What was erased may be written again by a later entry that carries the same bytes.
CREATE TRIGGER payloads_are_never_changed BEFORE UPDATE ON payloads FOR EACH ROW
WHEN (NOT (NEW.run_id = OLD.run_id AND NEW.digest = OLD.digest AND (NEW.bytes IS NULL OR OLD.bytes IS NULL)))
EXECUTE FUNCTION refuse('the ledger is append-only: a payload can be erased, not changed');

CREATE TRIGGER payloads_are_never_deleted BEFORE DELETE ON payloads FOR EACH ROW
EXECUTE FUNCTION refuse_without_tombstone('the ledger is append-only: payloads can be deleted only of an ended run that has a tombstone');

CREATE TRIGGER payloads_are_never_truncated BEFORE TRUNCATE ON payloads
EXECUTE FUNCTION refuse('the ledger is append-only: its payloads cannot be truncated');

CREATE TRIGGER secrets_are_never_changed BEFORE UPDATE ON secrets FOR EACH ROW
WHEN (NOT (NEW.run_id = OLD.run_id AND NEW.secret IS NULL))
EXECUTE FUNCTION refuse('a run''s secret can be erased, not changed');

CREATE TRIGGER tombstones_are_for_ended_runs BEFORE INSERT ON tombstones FOR EACH ROW
EXECUTE FUNCTION refuse_before_the_end('a run can be deleted once, and only after it has ended');

CREATE TRIGGER tombstones_are_never_changed BEFORE UPDATE ON tombstones FOR EACH ROW
EXECUTE FUNCTION refuse('a tombstone can be neither changed nor deleted');

CREATE TRIGGER tombstones_are_never_deleted BEFORE DELETE ON tombstones FOR EACH ROW
EXECUTE FUNCTION refuse('a tombstone can be neither changed nor deleted');

CREATE TRIGGER tombstones_are_never_truncated BEFORE TRUNCATE ON tombstones
EXECUTE FUNCTION refuse('a tombstone can be neither changed nor deleted');

CREATE TRIGGER runs_keep_their_ids BEFORE INSERT ON runs FOR EACH ROW
EXECUTE FUNCTION refuse_with_tombstone('a run of this id existed and was deleted');

CREATE TRIGGER runs_never_lower_their_tokens BEFORE UPDATE OF run_id, fencing_token ON runs FOR EACH ROW
WHEN (NEW.run_id <> OLD.run_id OR NEW.fencing_token < OLD.fencing_token)
EXECUTE FUNCTION refuse('a run keeps its id, and its fencing token never goes down');

CREATE TRIGGER runs_are_never_deleted BEFORE DELETE ON runs FOR EACH ROW
EXECUTE FUNCTION refuse_without_tombstone('the ledger is append-only: only an ended run that has a tombstone can be deleted');

CREATE TRIGGER runs_are_never_truncated BEFORE TRUNCATE ON runs
EXECUTE FUNCTION refuse('the ledger is append-only: only an ended run that has a tombstone can be deleted');
