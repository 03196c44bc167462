"""Where samples come from: one file a kind of source, each map-style and read by sample number."""
