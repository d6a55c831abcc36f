"""Where the roles of a run live when they do not live in its own process: Ray actors on one machine or many."""
