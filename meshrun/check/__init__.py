"""Checks that users run themselves: what a model draws at random, whether every mesh computes the same."""
