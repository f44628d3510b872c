"""The parts of ``scripts/benchmarks/async_saves``."""
