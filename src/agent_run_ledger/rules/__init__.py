"""Floor 1: the rules. No clock, no disk, no randomness that is not an argument.

They are functions of their arguments alone, but for `types`, which knows the classes that a program registered and which of them it has
warned about.
"""
