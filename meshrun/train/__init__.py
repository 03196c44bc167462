"""Steps: the loop, one update of it, evaluation, and what a loop of one's own needs."""
