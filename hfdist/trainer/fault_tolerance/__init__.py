"""What keeps a run going: steps that are not finite, rollback, preemption, restarts, the lock of a run folder."""
