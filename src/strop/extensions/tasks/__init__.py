"""Tasks for agents: software engineering, terminals, notebooks, questions with citations, web pages; ten tiny ones of each."""
