"""Operations on device tensors, one folder each: meaning (reference.py), kernel (kernel.py), door (op.py)."""
