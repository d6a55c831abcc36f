"""Commands that check something before or beside a run."""
