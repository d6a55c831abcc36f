"""Instructions that can be checked by a program."""
