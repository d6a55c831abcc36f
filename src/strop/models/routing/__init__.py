"""Router replay: the experts that an engine chose for a token are those that the learner computes it with."""
