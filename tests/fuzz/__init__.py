"""Fuzzing: every format that meshrun reads, given damaged inputs; docs/fuzzing.md says how to use it."""
