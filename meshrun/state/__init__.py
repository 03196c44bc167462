"""State: what a run keeps on disk and reads back."""
