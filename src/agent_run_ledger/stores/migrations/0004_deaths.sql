-- Schema 4. How many owners of a run died, or lost it, since its last entry, and the seq of that entry: once a later one is written the
-- number says nothing any more. Both go with the lease.
ALTER TABLE runs ADD COLUMN deaths INTEGER NOT NULL DEFAULT 0 CHECK (typeof(deaths) = 'integer');
ALTER TABLE runs ADD COLUMN deaths_after INTEGER;
