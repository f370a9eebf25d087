"""The operations on device tensors, one folder each: what it means (reference.py), how it runs (kernel.py), its door (op.py)."""
