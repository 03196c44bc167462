"""What a GPU does in one pass over memory where torch takes several: the update, and the loss over a vocabulary.

Each subject is one file of plain torch that is right everywhere, and beside it a `_…_triton.py` with the same in one
kernel, imported only where `here.available` says so. Nothing in this room knows of ranks.
"""
