"""Parts of the benchmarks: child processes, peers, the machine, FLOPs, tables and plots."""
