"""Pipeline parallelism: split a model into stages, run them by a schedule, and measure the schedule."""
