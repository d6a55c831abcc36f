"""Programs that run inside the sandbox. They import only the standard library and each other, and are sent there as text."""
