"""Programs that run inside sandboxes: the standard library of any Python from 3.6 on, no import of this package."""
