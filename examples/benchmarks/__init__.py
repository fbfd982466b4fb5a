"""Benchmarks: each module prints one table. All sides of a comparison are timed in one run, in turn."""
