"""The engine under PERSIA's contexts: one model, its two halves joined by TorchRec."""
