"""Programs that a policy writes, graded by tests in the sandbox."""
