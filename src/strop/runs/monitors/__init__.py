"""Monitoring of a run from outside the loop: services, machines, and hardware utilisation."""
