-- Schema 3. A head says what its run is sorted and found by, copied from the first entry, and when a worker may take it. `said_in` is a
-- function of the library: SQLite's own reading of a number may be off by its last bit, and `verify` compares all bits.
ALTER TABLE runs ADD COLUMN created_at REAL;
ALTER TABLE runs ADD COLUMN agent TEXT;
ALTER TABLE runs ADD COLUMN queue TEXT;
ALTER TABLE runs ADD COLUMN priority INTEGER NOT NULL DEFAULT 0 CHECK (typeof(priority) = 'integer');
ALTER TABLE runs ADD COLUMN key TEXT;
ALTER TABLE runs ADD COLUMN due REAL CHECK (due IS NULL OR typeof(due) = 'real' AND queue IS NOT NULL);

-- Who has a run that was moved away: another ledger, for good. It goes with the lease, which nobody has here any more.
ALTER TABLE runs ADD COLUMN moved_to TEXT CHECK (moved_to IS NULL OR owner IS NULL AND due IS NULL);

UPDATE runs SET
    created_at = said_in((SELECT body FROM entries WHERE run_id = runs.run_id AND seq = 1), 'at'),
    agent = said_in((SELECT body FROM entries WHERE run_id = runs.run_id AND seq = 1), 'agent');

-- One lane for each queue, agent and priority, in which those that have been due for longest come first.
CREATE INDEX runs_that_wait ON runs (queue, agent, priority, due, key) WHERE owner IS NULL AND due IS NOT NULL;
CREATE INDEX runs_that_are_busy ON runs (queue, key) WHERE owner IS NOT NULL AND due IS NOT NULL;

-- The clock by which runs are due; one row for each boot of the machine. How far it is ahead of the clock of that boot, and what it is
-- known to have reached. `news` moves whenever a worker that waits should look again.
CREATE TABLE boots (
    boot    TEXT    NOT NULL UNIQUE,
    ahead   REAL    NOT NULL,
    reached REAL    NOT NULL,
    news    INTEGER NOT NULL DEFAULT 0
);

-- What each worker said last, and when, by that clock.
CREATE TABLE workers (
    worker TEXT NOT NULL UNIQUE,
    said   BLOB NOT NULL,
    beat   REAL NOT NULL
);
