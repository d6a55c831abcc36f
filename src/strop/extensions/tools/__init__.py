"""Ready tools for policies."""
