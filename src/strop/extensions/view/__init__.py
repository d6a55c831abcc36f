"""``strop view``: runs in the browser. A server on loopback that reads log folders, and the page that it serves (``page/``)."""
