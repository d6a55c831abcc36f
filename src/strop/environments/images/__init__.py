"""Questions about images: rewards of answers in tags, and questions about drawn images."""
