"""Sandboxes of this machine: bubblewrap over the unpacked layers of an image."""
