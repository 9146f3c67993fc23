"""The executors of many ranks, on threads, processes and launched processes, and what their ranks share."""
