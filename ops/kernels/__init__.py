"""Numerical kernels: functions of plain tensors, each also a ``torch.library`` operator."""
