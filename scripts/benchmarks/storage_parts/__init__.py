"""The parts of ``scripts/benchmarks/storage``."""
