"""A storm: many workers, one store, one outside world, faults by a seeded schedule, and a judge who believes nobody."""
