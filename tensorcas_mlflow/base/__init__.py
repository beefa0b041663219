"""Base: settings, threads, digests, tensors, and small helpers that every room may use."""
