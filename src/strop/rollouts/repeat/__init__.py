"""Asynchronous runs that repeat: events are ordered by the steps of the embedded engine, never by a clock on the wall."""
