"""Batches: which samples a step uses, which of them are this rank's, and how they are read."""
