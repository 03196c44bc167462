"""Model on the mesh: one file an axis, and `build`, which says in which order they are applied."""
