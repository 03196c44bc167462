"""Folders of pictures become one HDF5 file, and texts one token file: in parallel, resumable, byte for byte alike."""
