"""Benchmarks: equality first, then interleaved times within one process."""
