"""Runs that are left to workers: submitting them, working on them, and seeing how they and the workers stand."""
