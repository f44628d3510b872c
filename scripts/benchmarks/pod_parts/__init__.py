"""The parts of ``scripts/benchmarks/pod``: saves and loads of a pod, simulated on one machine."""
