"""Floor 1: the rules, as functions of their arguments alone. No clock, no disk, no randomness that is not an argument."""
