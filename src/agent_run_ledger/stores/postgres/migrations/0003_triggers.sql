-- What may be erased, and when: behind an entry that says so, and nowhere else. So a payload is never gone without a word in the log.

CREATE FUNCTION refuse_unless_said() RETURNS TRIGGER LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF coalesce((SELECT kind FROM entries WHERE run_id = OLD.run_id ORDER BY seq DESC LIMIT 1), '') <> 'erased' THEN
        RAISE EXCEPTION '%', TG_ARGV[0] USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END $$;

CREATE TRIGGER entries_are_erased_with_a_word BEFORE UPDATE ON entries FOR EACH ROW
EXECUTE FUNCTION refuse_unless_said('the ledger is append-only: a payload can be erased only behind an entry that says so');

CREATE TRIGGER payloads_are_erased_with_a_word BEFORE UPDATE ON payloads FOR EACH ROW
WHEN (OLD.bytes IS NOT NULL)
EXECUTE FUNCTION refuse_unless_said('the ledger is append-only: a payload can be erased only behind an entry that says so');

-- The digest goes, too, once the bytes are erased.
DROP TRIGGER payloads_are_never_deleted ON payloads;
CREATE TRIGGER payloads_are_never_deleted BEFORE DELETE ON payloads FOR EACH ROW
WHEN (OLD.bytes IS NOT NULL)
EXECUTE FUNCTION refuse_without_tombstone('the ledger is append-only: payloads can be deleted once they are erased, or of an ended run that has a tombstone');

-- A secret of 32 bytes stands there plainly; a longer one is sealed under a key of somebody's, and can be sealed under another one.
DROP TRIGGER secrets_are_never_changed ON secrets;
CREATE TRIGGER secrets_are_never_changed BEFORE UPDATE ON secrets FOR EACH ROW
WHEN (NOT (
    NEW.run_id = OLD.run_id
    AND (NEW.secret IS NULL OR (octet_length(OLD.secret) > 32 AND octet_length(NEW.secret) > 32))
))
EXECUTE FUNCTION refuse('a run''s secret can be erased, not changed');

CREATE TRIGGER secrets_are_erased_with_a_word BEFORE UPDATE ON secrets FOR EACH ROW
WHEN (NEW.secret IS NULL)
EXECUTE FUNCTION refuse_unless_said('a run''s secret can be erased only behind an entry that says so');

CREATE TRIGGER secrets_are_never_deleted BEFORE DELETE ON secrets FOR EACH ROW
EXECUTE FUNCTION refuse_without_tombstone('a run''s secret can be deleted only with a run that has a tombstone');
