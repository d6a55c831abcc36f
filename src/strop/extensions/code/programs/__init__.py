"""Programs that run inside the sandbox. They import the standard library and each other alone, and are sent there as text."""
