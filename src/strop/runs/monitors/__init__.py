"""What watches a run from outside the loop: services, machines, and how much of the devices' arithmetic training uses."""
