"""Objects in worker processes, and the driver's side of each."""
